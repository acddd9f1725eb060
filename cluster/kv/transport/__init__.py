"""Sockets, copies, locks and threads of a handoff (`cluster/kv/handoff.py` tells its story). Each
side is a thread, so that neither a long copy nor a long step delays the other."""
