"""KV blocks travel from a prefill rank's process to a decode rank's, pulled by the reader.

1. The prefill engine holds a finished prompt's blocks under a ticket (`KVServer.hold`) and the
   ticket travels to a decode engine with the request.
2. From then on the reader renews the ticket's lease (`KVPuller.expect`).
3. When the decode engine has blocks of its own, the reader copies (`KVPuller.start`): through
   the holder's shared memory if both are on one node, else over TCP.
4. It releases the ticket; the answer tells whether the lease was alive throughout. Only then the
   bytes are believed.

Each side is a thread, so that neither a long copy nor a long step delays the other. The state
machines `KVHolder` and `KVPulls` of `cluster.kv` decide what may happen when; here are only
sockets, copies and locks. Every call and every answer is proved, and only a peer that knows the
holder's password finishes a handshake with it (`proofs.py`).
"""
