"""`LLM`: what people know from vLLM, on a tiny model. Tokens themselves are compared in tests/engine_model."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.config import EngineFlags
from common.engine.engine import Engine
from common.errors import ConfigError, ContextLengthError, InvalidRequestError
from common.offline.flags import _WITHOUT_EFFECT, OfflineFlags, make_flags
from common.offline.llm import LLM
from common.offline.params import SamplingParams, StructuredOutputsParams
from common.scheduling.output import StepResult

EOS = 2
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


def text_of(llm: LLM, token_ids: list[int], **options: Any) -> str:
    return llm.get_tokenizer().decode(token_ids, **options)


def test_a_program_written_for_vllm_runs_after_changing_one_import(model_dir: Path) -> None:
    program = """
from tandem import LLM, SamplingParams

llm = LLM(model=MODEL, dtype="float32", gpu_memory_utilization=0.9, max_model_len=128, enable_prefix_caching=True,
          num_gpu_blocks_override=64, num_threads=1)
outputs = llm.generate(["the quick", "the lazy"], SamplingParams(temperature=0.7, top_p=0.9, max_tokens=5))
for out in outputs:
    found.append((out.prompt, out.outputs[0].text, out.outputs[0].token_ids, out.outputs[0].finish_reason))
    assert out.outputs[0].cumulative_logprob is None
"""
    found: list[tuple[str, str, list[int], str]] = []
    exec(program, {"MODEL": str(model_dir), "found": found})
    assert [prompt for prompt, *_ in found] == ["the quick", "the lazy"]
    for _, _, ids, reason in found:
        assert reason == ("length" if len(ids) == 5 and ids[-1] != EOS else "stop")


def test_prompts_of_every_form_are_answered_in_order(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("the fox")
    prompts: list[Any] = ["the fox", ids, {"prompt": "the fox"}, {"prompt_token_ids": ids}, "the dog"]
    *same, other = llm.generate(prompts, SamplingParams(**GREEDY))
    assert len({tuple(out.outputs[0].token_ids) for out in same}) == 1
    assert [out.prompt for out in same] == ["the fox", None, "the fox", None]
    assert all(out.prompt_token_ids == ids and out.finished for out in same)
    assert other.prompt == "the dog"
    [single] = llm.generate("the fox", SamplingParams(**GREEDY))
    assert single.outputs == same[0].outputs
    [of_ids] = llm.generate(ids, SamplingParams(**GREEDY))
    assert of_ids.outputs == single.outputs


def test_text_is_what_the_tokenizer_makes_of_the_ids(llm: LLM) -> None:
    for out in llm.generate([f"the {i}" for i in range(8)], SamplingParams(max_tokens=20, temperature=1.5)):
        answer = out.outputs[0]
        whole = text_of(llm, out.prompt_token_ids + answer.token_ids)
        assert whole == (out.prompt or "") + answer.text


def test_a_thousand_prompts_of_mixed_lengths(llm: LLM) -> None:
    prompts = [[(7 * i + j) % 300 + 3 for j in range(1 + i % 37)] for i in range(1000)]
    params = [SamplingParams(**{**GREEDY, "max_tokens": 1 + i % 5}) for i in range(1000)]
    outputs = llm.generate(prompts, params)
    assert [out.prompt_token_ids for out in outputs] == prompts
    assert [len(out.outputs[0].token_ids) for out in outputs] == [1 + i % 5 for i in range(1000)]
    for i in (0, 511, 999):
        assert llm.generate(prompts[i], params[i])[0].outputs == outputs[i].outputs


def test_a_stop_text_ends_one_answer_and_no_other(llm: LLM) -> None:
    [free] = llm.generate("the", SamplingParams(n=3, temperature=1.3, seed=4, max_tokens=30, ignore_eos=True))
    texts = [answer.text for answer in free.outputs]
    stop = texts[1][8:11]
    assert len(stop) == 3
    [out] = llm.generate(
        "the", SamplingParams(n=3, temperature=1.3, seed=4, max_tokens=30, ignore_eos=True, stop=[stop], logprobs=0)
    )
    for answer, text in zip(out.outputs, texts, strict=True):
        assert answer.text == text.split(stop)[0]
        assert (answer.finish_reason, answer.stop_reason) == (("stop", stop) if stop in text else ("length", None))
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.token_ids)
    [included] = llm.generate(
        "the",
        SamplingParams(
            n=3, temperature=1.3, seed=4, max_tokens=30, ignore_eos=True, stop=stop, include_stop_str_in_output=True
        ),
    )
    assert included.outputs[1].text == texts[1].split(stop)[0] + stop


def test_an_end_token_is_among_the_ids_and_not_in_the_text(llm: LLM) -> None:
    [out] = llm.generate("the fox", SamplingParams(temperature=0.0, max_tokens=5, logit_bias={2: 100.0}, logprobs=1))
    answer = out.outputs[0]
    assert (answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason) == ("", [2], "stop", None)
    assert answer.logprobs is not None
    assert 2 in answer.logprobs[0]
    [ignored] = llm.generate(
        "the fox", SamplingParams(temperature=0.0, max_tokens=1, stop_token_ids=[5], logit_bias={5: 99})
    )
    assert (ignored.outputs[0].finish_reason, ignored.outputs[0].stop_reason) == ("stop", 5)


def test_logprobs_of_answers_and_prompts(llm: LLM) -> None:
    [out] = llm.generate("the quick fox", SamplingParams(**GREEDY, logprobs=2, prompt_logprobs=1))
    answer = out.outputs[0]
    assert answer.logprobs is not None
    for token_id, shown in zip(answer.token_ids, answer.logprobs, strict=True):
        assert next(iter(shown)) == token_id, "greedy takes the most likely one"
        assert [one.rank for one in shown.values()] == [1, 2]
        assert shown[token_id].decoded_token == llm.get_tokenizer().token_text(token_id)
    total = math.fsum(shown[i].logprob for i, shown in zip(answer.token_ids, answer.logprobs, strict=True))
    assert answer.cumulative_logprob == pytest.approx(total)
    assert out.prompt_logprobs is not None
    first, *rest = out.prompt_logprobs
    assert first is None
    for token_id, maybe in zip(out.prompt_token_ids[1:], rest, strict=True):
        assert maybe is not None
        assert maybe[token_id].rank is not None
        assert 1 <= len(maybe) <= 2


def test_best_of_returns_the_most_likely_answers(llm: LLM) -> None:
    drawn = {"temperature": 1.2, "seed": 9, "max_tokens": 8, "ignore_eos": True}
    [everything] = llm.generate("the", SamplingParams(n=6, logprobs=0, **drawn))
    ranked = sorted(everything.outputs, key=lambda answer: answer.cumulative_logprob or 0.0, reverse=True)
    [best] = llm.generate("the", SamplingParams(n=2, best_of=6, **drawn))
    assert [answer.token_ids for answer in best.outputs] == [answer.token_ids for answer in ranked[:2]]
    assert [answer.index for answer in best.outputs] == [0, 1]


def test_beams_come_best_first(llm: LLM) -> None:
    [out] = llm.generate(
        "the", SamplingParams(n=3, use_beam_search=True, beam_width=4, max_tokens=6, length_penalty=0.0)
    )
    scores = [answer.cumulative_logprob for answer in out.outputs]
    assert scores == sorted(scores, key=lambda score: score or 0.0, reverse=True)
    assert len({tuple(answer.token_ids) for answer in out.outputs}) == 3
    [greedy] = llm.generate("the", SamplingParams(temperature=0.0, max_tokens=6, logprobs=0))
    assert scores[0] is not None
    assert greedy.outputs[0].cumulative_logprob is not None
    assert scores[0] >= greedy.outputs[0].cumulative_logprob - 1e-4


@pytest.mark.parametrize(
    ("wanted", "check"),
    [
        (StructuredOutputsParams(regex="[0-9]{3}"), str.isdigit),
        (StructuredOutputsParams(choice=["fox", "dog"]), ["fox", "dog"].__contains__),
        (StructuredOutputsParams(json={"type": "integer"}), json.loads),
        (StructuredOutputsParams(json='{"type": "boolean"}'), lambda text: isinstance(json.loads(text), bool)),
    ],
)
def test_structured_outputs_hold(llm: LLM, wanted: StructuredOutputsParams, check: Callable[[str], Any]) -> None:
    [out] = llm.generate("the", SamplingParams(n=2, max_tokens=40, seed=3, structured_outputs=wanted))
    for answer in out.outputs:
        if answer.finish_reason == "stop":
            assert check(answer.text) is not False
    assert any(answer.finish_reason == "stop" for answer in out.outputs)


def test_chat_renders_the_models_template(llm: LLM) -> None:
    user = {"role": "user", "content": "the fox"}
    [one] = llm.chat([user], SamplingParams(**GREEDY))
    assert one.prompt == "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    several = llm.chat([[user], [user, {"role": "assistant", "content": "dog"}]], SamplingParams(**GREEDY))
    assert several[0].outputs == one.outputs
    assert several[1].prompt is not None
    assert "dog" in several[1].prompt


def test_default_params_are_the_models(llm: LLM, make_llm: Callable[..., LLM]) -> None:
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.9, 16)
    neutral = make_llm(generation_config="vllm").get_default_sampling_params()
    assert (neutral.temperature, neutral.top_p) == (1.0, 1.0)


def test_the_same_program_draws_the_same_answers(make_llm: Callable[..., LLM]) -> None:
    def run(**keywords: Any) -> list[list[int]]:
        outputs = make_llm(**keywords).generate(["the", "the"], SamplingParams(max_tokens=8, temperature=1.5))
        return [out.outputs[0].token_ids for out in outputs]

    first = run()
    assert first[0] != first[1], "prompts have seeds of their own"
    assert run() == first
    assert run(seed=1) != first


def test_prefix_cache(llm: LLM) -> None:
    prompt = list(range(3, 100))
    llm.reset_prefix_cache()
    assert [llm.generate(prompt, SamplingParams(**GREEDY))[0].num_cached_tokens for _ in range(2)] == [0, 96]
    llm.reset_prefix_cache()
    assert llm.generate(prompt, SamplingParams(**GREEDY))[0].num_cached_tokens == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1.0}, r"temperature is -1.0, must be from 0.0"),
        ({"temperature": "hot"}, r"temperature is 'hot', must be a number"),
        ({"n": 0}, r"n is 0, must be from 1 to 128"),
        ({"n": 17}, r"n is 17, this node runs at most 16 sequences"),
        ({"n": 3, "best_of": 2}, r"best_of is 2, must be at least n \(3\)"),
        ({"beam_width": 3}, r"beam_width is 3, which needs use_beam_search"),
        ({"n": 3, "use_beam_search": True, "beam_width": 2}, r"beam_width is 2, must be at least n \(3\)"),
        ({"use_beam_search": True, "top_p": 0.5}, r"top_p is 0.5, must be 1.0 with beam search"),
        ({"stop": ["", "x"]}, r"stop has ''"),
        ({"stop": "x", "detokenize": False}, r"stop is given, must be empty with detokenize false"),
        ({"logit_bias": {5000: 1.0}}, r"logit_bias has token id 5000, must be from 0 to"),
        ({"structured_outputs": StructuredOutputsParams(regex="(")}, r"structured_outputs.regex: "),
        ({"structured_outputs": StructuredOutputsParams()}, r"structured_outputs has none of json"),
        ({"max_tokens": 0}, r"max_tokens is 0, must be from 1"),
    ],
)
def test_wrong_parameters_are_named_and_nothing_starts(llm: LLM, params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^prompt 1: {message}"):
        llm.generate(["the", "fox"], [SamplingParams(), SamplingParams(**params)])
    with pytest.raises(InvalidRequestError, match=f"^{message}"):
        llm.generate("fox", SamplingParams(**params))


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("", InvalidRequestError, "empty"),
        ([], InvalidRequestError, "is empty, must have at least one token"),
        ([1, 99999], InvalidRequestError, "token id 99999, must be from 0 to"),
        ([-1], InvalidRequestError, "token id -1"),
        ({"text": "x"}, InvalidRequestError, "one of prompt, prompt_token_ids"),
        (list(range(3, 300)), ContextLengthError, "maximum context length is 256"),
    ],
)
def test_wrong_prompts_are_named(llm: LLM, prompt: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"^prompt 1: .*{message}"):
        llm.generate(["the", prompt])
    with pytest.raises(InvalidRequestError, match="2 prompts and 1 sampling_params"):
        llm.generate(["the", "fox"], [SamplingParams()])


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_an_answer_ends_where_the_context_does(llm: LLM) -> None:
    [out] = llm.generate(list(range(3, 253)), SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True))
    assert (len(out.outputs[0].token_ids), out.outputs[0].finish_reason) == (6, "length")


def test_a_step_that_fails_ends_its_answers_with_the_reason(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = llm._engine._runner
    execute = runner.execute
    calls: list[int] = []

    def break_once(*args: Any) -> StepResult:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of luck")
        return execute(*args)

    monkeypatch.setattr(runner, "execute", break_once)
    params = [SamplingParams(**{**GREEDY, "max_tokens": 1}), SamplingParams(**GREEDY)]
    quick, slow = llm.generate(["the", "fox"], params)
    assert quick.outputs[0].finish_reason == "length"
    assert (slow.outputs[0].finish_reason, slow.outputs[0].error) == ("error", "RuntimeError: out of luck")
    assert len(slow.outputs[0].token_ids) == 1
    assert slow.finished


def test_after_ctrl_c_it_goes_on_as_new(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step
    calls: list[int] = []

    def interrupt(engine: Engine) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["the"] * 40, SamplingParams(n=2, max_tokens=30))
    assert not llm._engine.scheduler.requests
    assert llm.generate("the", SamplingParams(**GREEDY))[0].finished


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_on_terminals_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, use_tqdm, is_shown in (
        (Terminal(), True, True),
        (Terminal(), False, False),
        (io.StringIO(), True, False),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        llm.generate(["the", "fox"], SamplingParams(**GREEDY), use_tqdm=use_tqdm)
        text = stream.getvalue()
        assert ("2/2" in text and "input" in text and "output" in text and "tok/s" in text) == is_shown
        assert bool(text) == is_shown


def test_keywords_are_the_servers_flags() -> None:
    assert set(EngineFlags.model_fields) <= set(OfflineFlags.model_fields)


def test_values_that_change_nothing_here_are_taken() -> None:
    neutral: dict[str, Any] = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "trust_remote_code": False,
        "quantization": None,
        "revision": None,
        "load_format": "auto",
        "cpu_offload_gb": 0.0,
        "enforce_eager": True,
        "tokenizer": "some/model",
        "seed": None,
        "max_num_seqs": None,
    }
    assert make_flags("some/model", neutral) == make_flags("some/model", {})
    assert make_flags("some/model", {"seed": 3, **dict.fromkeys(_WITHOUT_EFFECT)}).seed == 3
    assert not set(OfflineFlags.model_fields) & set(_WITHOUT_EFFECT), "a flag has an effect"


def test_paths_are_as_good_as_their_text() -> None:
    by_path = make_flags(Path("some/model"), {"tokenizer": Path("some/model"), "chat_template": Path("a.jinja")})
    assert by_path == make_flags("some/model", {"chat_template": "a.jinja"})
    with pytest.raises(ConfigError, match="model is 3: must be a valid string"):
        make_flags(3, {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_model_length": 8}, "no keyword 'max_model_length', did you mean max_model_len?"),
        ({"max_model_len": 0}, "max_model_len is 0: must be greater than or equal to 1"),
        ({"exact_activations": 1}, "exact_activations is 1: must be true or false"),
        ({"max_num_seqs": True}, "max_num_seqs is True: must be a number"),
        ({"max_num_seqs": 10**26}, "less than or equal to 10000000"),
        ({"block_size": 16.0}, "block_size is 16.0: must be an integer"),
        ({"swap_space": float("inf")}, "swap_space is inf: must be a size such as 512MiB or 4GiB"),
        ({"kv_cache_memory_bytes": float("inf")}, "must be a size such as 512MiB or 4GiB"),
        ({"record_steps": ""}, "record_steps is '': must not be empty"),
        ({"dtype": "float8"}, "dtype is 'float8': must be 'float32'"),
        ({"max_model_len": 4096}, "4096, the model's context has 256"),
        ({"tensor_paralel_size": 1}, "no keyword 'tensor_paralel_size', did you mean tensor_parallel_size?"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, which is not supported; only 1 is"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size is True, which is not supported"),
        ({"trust_remote_code": True}, "trust_remote_code is True, which is not supported; only False is"),
        ({"quantization": "awq"}, "quantization is 'awq': must be 'none', 'int8', 'int4', 'gguf' or 'auto'"),
        ({"tokenizer": "another"}, "tokenizer is 'another', which is not supported; only '"),
        ({"device": "cuda"}, "device is 'cuda', which is not supported; only 'auto' or 'cpu' is"),
    ],
)
def test_wrong_keywords_are_named(make_llm: Callable[..., LLM], keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_llm(**keywords)
    assert message in str(raised.value)
