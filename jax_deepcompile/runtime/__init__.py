"""What touches the machine: processes, threads, signals, files."""
