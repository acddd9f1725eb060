"""One rank: its inputs, its runner, its agreement with others and its KV transfer."""
