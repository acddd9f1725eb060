"""What was compiled before: keys, files, and which rank compiles what is missing."""
