"""The building blocks of every family, each sharded by a `Shard`."""
