"""Streams one answer from a gateway with `tessera.client`, and says how it ended.

python examples/chat.py 127.0.0.1:50051 "Why is the sky blue?"
"""

import sys

from tessera.client import ChatMessage, Client, TesseraError

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
question = sys.argv[2] if len(sys.argv) > 2 else "What is the capital of France?"
with Client(address) as client:
    try:
        for piece in client.stream([ChatMessage("user", question)], temperature=0.0, max_tokens=64, max_queue_ms=30_000):
            print(piece.text, end="", flush=True)
            if piece.finish is not None:
                usage = piece.finish.usage
                print(
                    f"\n[{piece.finish.reason.value}; prompt {usage.prompt_tokens} tokens, "
                    f"answer {usage.completion_tokens} tokens]",
                    file=sys.stderr,
                )
    except TesseraError as error:
        sys.exit(f"{error.code.name}: {error}")
