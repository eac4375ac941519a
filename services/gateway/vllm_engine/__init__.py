"""vllm.grpc.engine.VllmEngine: the protocol by which gateways such as smg drive an engine. Imported only where it is served."""
