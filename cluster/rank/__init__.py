"""One rank: its inputs, its runner, its agreement with others and the KV that it hands over."""
