"""Pure logic of KV block management; the process is `services/scheduler`, which owns every block table."""
