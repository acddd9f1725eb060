"""What is counted and said about ranks: metrics, counters, logs."""
