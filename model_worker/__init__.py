"""Pure logic of model execution on torch; the process is `services/worker`."""
