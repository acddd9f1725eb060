"""Who computes a request: the pools' replicas, the router, mailboxes for tokens, quarantine."""
