"""What parameters may be, and how a wrong one is named: by the user's field, its value and what is allowed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from common.errors import InvalidRequestError
from common.offline import params as offline
from common.offline.llm import LLM
from common.offline.params import SamplingParams, StructuredOutputsParams, checked_params
from common.sampling_params import SamplingParams as EngineParams
from proxy import choice_schema, openai_schema

BEAMS = {"use_beam_search": True, "n": 2}


def to_engine(llm: LLM, **values: Any) -> EngineParams:
    tokenizer = llm.get_tokenizer()
    return checked_params(SamplingParams(**values)).to_engine(tokenizer, vocab_size=tokenizer.num_tokens, seed=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": True}, "n is True, must be a whole number"),
        ({"n": 129}, "n is 129, must be from 1 to 128"),
        ({"best_of": "a"}, "best_of is 'a', must be a whole number"),
        ({"temperature": None}, "temperature is None, must be a number"),
        ({"top_k": 1.5}, "top_k is 1.5, must be a whole number"),
        ({"ignore_eos": 1}, "ignore_eos is 1, must be True or False"),
        ({"detokenize": 0}, "detokenize is 0, must be True or False"),
        ({"stop": 5}, "stop is 5, must be a text or a list"),
        ({"stop": ["a", 5]}, "stop[1] is 5, must be a text"),
        ({"stop": "\ud800"}, "stop holds a lone surrogate, which is no character"),
        ({"stop": ["a"] * 17}, "stop has 17 texts, at most 16 are allowed"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5, must be a list"),
        ({"stop_token_ids": [1, True]}, "stop_token_ids[1] is True, must be a whole number"),
        ({"allowed_token_ids": 5}, "allowed_token_ids is 5, must be a list"),
        ({"allowed_token_ids": b"ab"}, "allowed_token_ids is b'ab', must be a list"),
        ({"bad_words": 5}, "bad_words is 5, must be a list"),
        ({"bad_words": "abc"}, "bad_words is 'abc', must be a list"),
        ({"bad_words": [5]}, "bad_words[0] is 5, must be a text"),
        ({"bad_words": [""]}, "bad_words has '', must hold texts of 1 to 128 characters"),
        ({"bad_words": ["🙂" * 100]}, "bad_words has "),  # more tokens than an engine takes, by the user's name
        ({"logit_bias": [1]}, "logit_bias is [1], must be a dict"),
        ({"logit_bias": {5: "a"}}, "logit_bias[5] is 'a', must be a number"),
        ({"logit_bias": {"fox": 1.0}}, "logit_bias has the key 'fox', must be a whole number"),
        ({"logit_bias": {"05": 1.0}}, "logit_bias has the key '05', must be a whole number"),
        ({"logit_bias": {"5": 1.0, 5: 2.0}}, "logit_bias has a token id twice"),
        ({"logit_bias": {"5000": 1.0}}, "logit_bias has token id 5000, must be from 0 to"),
        ({"structured_outputs": 5}, "structured_outputs is 5, must be an instance of StructuredOutputsParams"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs has the key 'regexp', must have one of json,"),
        ({"structured_outputs": {}}, "structured_outputs has none of json, regex"),
        ({"structured_outputs": StructuredOutputsParams(regex=5)}, "structured_outputs.regex is 5, must be a text"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json is 5, must be a dict or a text"),
        ({"structured_outputs": {"json": {"a": object}}}, "structured_outputs.json cannot be written as JSON"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice is 'ab', must be a list"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1] is 1, must be a text"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice has 0 choices, must have from 1 to 1024"),
        ({**BEAMS, "beam_width": 0}, "beam_width is 0, must be at least n (2)"),
        ({**BEAMS, "beam_width": "a"}, "beam_width is 'a', must be a whole number"),
        ({**BEAMS, "best_of": 3, "beam_width": 4}, "best_of is 3, must be absent or beam_width (4)"),
        ({**BEAMS, "length_penalty": "a"}, "length_penalty is 'a', must be a number"),
        ({**BEAMS, "early_stopping": "a"}, "early_stopping is 'a', must be True or False or 'never'"),
        ({**BEAMS, "early_stopping": 1}, "early_stopping is 1, must be True or False or 'never'"),
        ({**BEAMS, "bad_words": ["a"]}, "bad_words cannot be had with use_beam_search true"),
        ({**BEAMS, "stop": "a"}, "stop cannot be had with use_beam_search true"),
        ({**BEAMS, "structured_outputs": {"regex": "a"}}, "structured_outputs cannot be had with use_beam_search true"),
        ({"use_beam_search": "yes"}, "use_beam_search is 'yes', must be True or False"),
        ({"early_stopping": True}, "early_stopping is True, which needs use_beam_search true"),
    ],
)
def test_what_is_wrong_is_named_by_its_field(llm: LLM, values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        to_engine(llm, **values)
    assert raised.value.message.startswith(message)
    assert raised.value.param is not None
    assert raised.value.param.split(".")[0] in values


def test_only_sampling_params_are_taken(llm: LLM) -> None:
    for wrong in (5, [5], "a", {"n": 1}):
        with pytest.raises(InvalidRequestError, match=r"^sampling_params is .*, must be SamplingParams, or a list"):
            llm.generate(["the"], wrong)


def test_what_numpy_and_json_give_counts_as_pythons(llm: LLM) -> None:
    given = to_engine(
        llm,
        n=np.int64(2),
        temperature=np.float32(0.5),
        ignore_eos=np.bool_(True),
        stop_token_ids=np.array([5, 6]),
        allowed_token_ids=range(3, 9),
        logit_bias={"5": 1, np.int64(6): np.float64(2.0)},
        bad_words=("fox",),
        min_tokens=1,
    )
    plain = to_engine(
        llm,
        n=2,
        temperature=0.5,
        ignore_eos=True,
        stop_token_ids=[5, 6],
        allowed_token_ids=[3, 4, 5, 6, 7, 8],
        logit_bias={5: 1.0, 6: 2.0},
        bad_words=["fox"],
        min_tokens=1,
    )
    assert given == plain
    assert {type(token_id) for token_id in (*given.stop_token_ids, *given.logit_bias)} == {int}


def test_answers_do_not_follow_what_becomes_of_their_params(llm: LLM) -> None:
    params = SamplingParams(stop=["a"], temperature=1)
    copy = checked_params(params)
    params.stop.append("b")
    params.n = 7
    assert (copy.stops, copy.n, type(copy.temperature)) == (("a",), 1, float)


def test_a_width_is_what_it_says(llm: LLM) -> None:
    for values, width in (({}, 2), ({"best_of": 3}, 3), ({"beam_width": 4}, 4), ({"best_of": 4, "beam_width": 4}, 4)):
        search = to_engine(llm, **BEAMS, **values).beam_search
        assert search is not None
        assert search.width == width
    assert to_engine(llm, n=2, beam_width=2).beam_search is None, "asks for nothing"


def test_a_dict_is_as_good_as_structured_outputs_params(llm: LLM) -> None:
    [out] = llm.generate("the", SamplingParams(max_tokens=8, structured_outputs={"regex": "[0-9]{3}"}))
    assert out.outputs[0].text.isdigit()


def test_limits_are_the_proxys() -> None:
    limits = (offline.MAX_N, offline.MAX_STOPS, offline.MAX_STOP_LENGTH)
    assert limits == (choice_schema.MAX_N, openai_schema.MAX_STOP_STRINGS, openai_schema.MAX_STOP_LENGTH)
    words = (offline.MAX_BAD_WORDS, offline.MAX_BAD_WORD_LENGTH)
    assert words == (openai_schema.MAX_BAD_WORDS, openai_schema.MAX_BAD_WORD_LENGTH)
