"""Pure logic of turning text into tokens and back; the process is `services/gateway`."""
