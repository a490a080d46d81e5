"""Sampling parameters as values: what is refused, here and on arrival by wire, and that nothing is lost on the way."""

from __future__ import annotations

import msgspec
import pytest

from common.messages import Decode
from common.sampling_params import BeamSearchParams, SamplingParams
from common.structured_output import MAX_GRAMMAR_BYTES, StructuredOutput

FULL = SamplingParams(
    temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, max_tokens=9, min_tokens=4, seed=-3, stop_token_ids=(5, 6),
    presence_penalty=1.5, frequency_penalty=-2.0, repetition_penalty=1.1,
    logit_bias={7: -100.0, 9: 3.5}, allowed_token_ids=(1, 2, 3), bad_words_token_ids=((4,), (5, 6)),
    structured_output=StructuredOutput("regex", "a+", "guided_regex"), logprobs=2, prompt_logprobs=3,
)  # fmt: skip


def test_m09_all_parameters_survive_the_wire() -> None:
    """Sets derived from the parameters were lost when these were serialised: here nothing is derived before."""
    same = [name for name in SamplingParams.__struct_fields__ if getattr(FULL, name) == getattr(SamplingParams(), name)]
    assert same == ["ignore_eos", "beam_search"]  # they exclude others
    beams = BeamSearchParams(width=7, length_penalty=-0.5, early_stopping="never")
    for params in (FULL, SamplingParams(ignore_eos=True, beam_search=beams)):
        decode = Decode(request_id="r", leg=1, prompt_token_ids=[1], params=params)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(decode), type=Decode) == decode


def test_a_thousand_biases_are_a_few_kilobytes() -> None:
    params = SamplingParams(logit_bias={40_000 + i: 0.1 * (i % 50) for i in range(1024)})
    assert len(msgspec.msgpack.encode(params)) < 13_000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1001.0),
        ("repetition_penalty", float("inf")),
        ("logit_bias", {5: 1000.0}),
        ("logit_bias", {-3: 1.0}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("min_tokens", -1),
        ("min_tokens", 10),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (2**32,)),
        ("bad_words_token_ids", ((),)),
        ("bad_words_token_ids", ((1, -1),)),
        ("bad_words_token_ids", ((1,),) * 257),
        ("bad_words_token_ids", ((1,) * 129,)),
    ],
)
def test_values_out_of_range_are_refused_by_name_here_and_on_arrival(field: str, value: object) -> None:
    fields = {"max_tokens": 9, field: value}
    with pytest.raises(ValueError, match=f"^{field} "):
        SamplingParams(**fields)
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=SamplingParams)


def test_the_vocabulary_is_checked_by_whoever_has_one() -> None:
    FULL.check_vocabulary(10)
    with pytest.raises(ValueError, match="logit_bias has token id 9, must be from 0 to 8"):
        FULL.check_vocabulary(9)


def test_an_answer_that_must_match_ends_at_an_end_token() -> None:
    with pytest.raises(ValueError, match=r"^ignore_eos is true, must be false: guided_regex ends at"):
        msgspec.structs.replace(FULL, ignore_eos=True)


def test_grammars_are_bounded_and_named_as_the_client_does_here_and_on_arrival() -> None:
    text = "a" * (MAX_GRAMMAR_BYTES + 1)
    with pytest.raises(ValueError, match=r"^guided_regex has 65537 bytes, at most 65536 are allowed"):
        StructuredOutput("regex", text, "guided_regex")
    sent = msgspec.msgpack.encode({"structured_output": {"kind": "regex", "text": text}})
    with pytest.raises(msgspec.ValidationError, match="65537 bytes"):
        msgspec.msgpack.decode(sent, type=SamplingParams)
    with pytest.raises(msgspec.ValidationError, match="kind"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"kind": "poem"}), type=StructuredOutput)
    with pytest.raises(ValueError, match="lone surrogate"):
        StructuredOutput("regex", "\ud800")
