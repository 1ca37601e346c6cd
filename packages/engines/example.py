"""Print the tokens that an SGLang server samples: ``python example.py http://127.0.0.1:30000``."""

import asyncio
import sys

from megatron_dppo_engines.responses import SamplingParams
from megatron_dppo_engines.server import GenerateRequest
from megatron_dppo_engines.sglang import SGLangServer


async def main(url: str) -> None:
    """Send one request."""
    server = SGLangServer(url)
    try:
        prompt = await server.tokenize("1 + 1 =")
        if prompt is None:
            raise SystemExit(f"{url} has no tokenizer; send token ids of your own")
        params = SamplingParams(max_new_tokens=8, topk_logprobs=4)
        generation = await server.generate(GenerateRequest(request_id="1", token_ids=prompt, params=params))
        print(generation.token_ids.tolist(), generation.logprobs.tolist(), generation.versions)
    finally:
        await server.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
