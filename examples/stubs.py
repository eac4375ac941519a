"""Streams one answer with nothing but the generated stubs: what a client in any language does.

python examples/stubs.py 127.0.0.1:50051 "Why is the sky blue?"
"""

import sys

import grpc

from tessera.v1 import inference_pb2 as pb
from tessera.v1.inference_pb2_grpc import InferenceServiceStub

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
question = sys.argv[2] if len(sys.argv) > 2 else "What is the capital of France?"
generation = pb.Generation(
    chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=question)]),
    sampling=pb.Sampling(temperature=0, max_tokens=64),
    limits=pb.Limits(max_queue_ms=30_000),
)
with grpc.insecure_channel(address) as channel:
    try:
        for piece in InferenceServiceStub(channel).StreamGenerate(pb.StreamGenerateRequest(generation=generation), timeout=120):
            print(piece.text, end="", flush=True)
            if piece.HasField("finish"):
                reason, usage = pb.FinishReason.Name(piece.finish.reason), piece.finish.usage
                print(
                    f"\n[{reason}; prompt {usage.prompt_tokens} tokens, answer {usage.completion_tokens} tokens]",
                    file=sys.stderr,
                )
    except grpc.RpcError as error:
        sys.exit(f"{error.code().name}: {error.details()}")
