"""The worker process: one model replica behind gRPC; the logic is in `model_worker`."""
