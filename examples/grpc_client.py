"""A chat over gRPC. Start a server first:  atlas-jax serve tiny-agent --grpc :50051"""

import asyncio
import sys

from atlas_jax.serve.client import AtlasClient

QUESTION = [{"role": "user", "content": "I want to cancel my flight."}]


async def main(address: str = "127.0.0.1:50051") -> None:
    async with AtlasClient(address, timeout_s=60.0) as client:
        async for piece in client.generate(QUESTION, max_tokens=64):
            print(piece.text, end="", flush=True)
            if piece.HasField("completion"):
                drafts = piece.completion.acceptance
                print(f"\n{drafts.emitted} tokens, {drafts.accepted} of {drafts.drafted} drafts accepted")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
