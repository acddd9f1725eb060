"""What an operator sees: metrics, logs, traces, progress, the status page."""
