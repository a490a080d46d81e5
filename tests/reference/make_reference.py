"""Recomputes greedy_reference.json: `python tests/reference/make_reference.py MODEL_DIR` (needs transformers; minutes).

For each prompt: its token ids and what transformers' greedy decoding in float32 gives, 64 tokens, with the two best
log-probabilities at each step, so that a test can tell a wrong token from a tie within rounding.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_OUTPUTS = 64
TARGET = Path(__file__).with_name("greedy_reference.json")

CHATS = {
    "chat_short": "What is the capital of France?",
    "chat_list": "Name five things one finds in a kitchen, as a numbered list.",
    "chat_unicode": "Übersetze ins Englische: »Grüße aus Zürich, schöne Straße« 😀",
    "chat_reason": "A train leaves at 9:40 and arrives at 12:05. How long does the trip take?",
}
TEXTS = {
    "text_story": "Once upon a time, in a small village by the sea,",
    "text_code": "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "text_json": '{"name": "Ada", "born": 1815, "works": [',
    "text_cjk": "東京は日本の首都です。人口は",
    "text_cyrillic": "Москва — столица",
    "text_emoji": "🎉🎊 Happy new year! 🥳",
    "text_digits": "3.14159265358979323846",
    "text_spaces": "   \n\n\t indented\n      more",
}
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 255, 256, 257, 500, 1000, 2000)
PASSAGE = (
    "The harbour master kept a ledger of every ship that came in: its name, the port it had left, what it carried and "
    "how long it would stay. In winter the list was short. Fishing boats went out before dawn and came back with the "
    "tide, and the only strangers were coal barges from the north. In spring the pages filled again. There were grain "
    "ships and timber ships, and once a circus with two elephants that refused to walk down the plank. "
)


def prompts(tokenizer: AutoTokenizer) -> dict[str, list[int]]:
    found = {
        name: tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for name, text in CHATS.items()
    }
    found |= {name: tokenizer(text)["input_ids"] for name, text in TEXTS.items()}
    passage: list[int] = []
    for year in range(1850, 1890):
        passage += tokenizer(f"{year}. " + PASSAGE)["input_ids"]
    found |= {f"length_{n}": passage[:n] for n in LENGTHS}
    return found


@torch.inference_mode()
def greedy(model: AutoModelForCausalLM, ids: list[int], stops: set[int]) -> tuple[list[int], list[list[float]]]:
    """Output ids, and per step [best id, its log-probability, second id, its log-probability]."""
    outputs: list[int] = []
    steps: list[list[float]] = []
    state = model(torch.tensor([ids]), use_cache=True)
    while len(outputs) < NUM_OUTPUTS:
        best = torch.topk(torch.log_softmax(state.logits[0, -1].float(), -1), 2)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        steps.append([x for i, v in pairs for x in (i, round(v, 6))])
        outputs.append(int(best.indices[0]))
        if outputs[-1] in stops:
            break
        state = model(torch.tensor([[outputs[-1]]]), cache=state.cache, use_cache=True)
    return outputs, steps


def main(model_dir: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    cases = {}
    for name, ids in prompts(tokenizer).items():
        outputs, steps = greedy(model, ids, {tokenizer.eos_token_id})
        margin = min(s[1] - s[3] for s in steps)
        print(f"{name:16} {len(ids):5} -> {len(outputs):3}  smallest margin {margin:.5f}", flush=True)
        cases[name] = {"prompt_token_ids": ids, "output_token_ids": outputs, "steps": steps}
    TARGET.write_text("{\n" + ",\n".join(f"{json.dumps(n)}: {json.dumps(c)}" for n, c in cases.items()) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1])
