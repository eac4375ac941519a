"""Pure logic of scheduling, journalling and recovery; the process is `services/scheduler`."""
