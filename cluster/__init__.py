"""What computes when: ranks, groups, scheduling, KV blocks and their transfer."""
