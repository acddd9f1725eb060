"""Who computes, when and with whom: ranks, groups, scheduling, KV blocks and their transfer."""
