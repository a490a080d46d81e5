"""Compiled grammars over a small vocabulary: beside enumerated languages, on random walks, rebuilt, shared, refused."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLParserLimits
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from common.errors import GrammarError, InvalidRequestError
from common.grammar import compiler as compiler_module
from common.grammar.compiler import GrammarCompiler
from common.structured_output import Grammar, Kind, StructuredOutput
from common.text.tokenizer import TextTokenizer

END = 0
WIDTH = 450  # of the output layer: wider than the tokenizer, no multiple of 32


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|other|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(
        ['{"name": "Ann", "age": 31}', "yes yesterday no none abab aab", "[1, 22, 333]"] * 20, trainer
    )
    directory = tmp_path_factory.mktemp("model")
    made.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def vocabulary(model_dir: Path) -> dict[int, bytes]:
    """What each ordinary token spells."""
    tokenizer = TextTokenizer.from_directory(model_dir)
    return {i: tokenizer.piece(i).data for i in range(2, tokenizer.num_tokens)}


@pytest.fixture(scope="module")
def compiler(model_dir: Path) -> GrammarCompiler:
    return GrammarCompiler(model_dir, WIDTH, {END})


def allowed(mask: np.ndarray) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[WIDTH:].any()
    return set(np.flatnonzero(bits).tolist())


WORDS = ["yes", "yesterday", "no", "none", "", "é🙂", 'a "b" \\ /c/']
HEADS = ["".join(parts) for n in (1, 2, 3) for parts in itertools.product(("ab", "a"), repeat=n)]
TAILS = ("terday", "!")
FINITE: list[tuple[Kind, str, list[str]]] = [
    ("choice", json.dumps(WORDS), WORDS),
    ("choice", '["ab"]', ["ab"]),
    ("regex", r"(ab|a){1,3}[0-9]?", [head + tail for head in HEADS for tail in ("", *"0123456789")]),
    (
        "grammar",
        'start: "yes" tail~1..2 | "no"\ntail: "terday" | "!"',
        ["no", *(f"yes{one}{two}" for one in TAILS for two in (*TAILS, ""))],
    ),
    ("grammar", 'root ::= "yes" | "no" "ne"?\n\n\n', ["yes", "no", "none"]),
    ("json_schema", '{"enum": ["yes", 31, null]}', ['"yes"', "31", "null"]),
]


@pytest.mark.parametrize(("kind", "text", "words"), FINITE)
def test_tokens_that_a_word_goes_on_with_are_allowed_and_no_others(
    compiler: GrammarCompiler, vocabulary: dict[int, bytes], kind: Kind, text: str, words: list[str]
) -> None:
    """At every place that tokens can come to. Where only one byte can follow, the library may ask for the one token
    that the tokenizer would take."""
    grammar = compiler.compile(StructuredOutput(kind, text))
    language = [word.encode() for word in words]
    places: list[tuple[list[int], bytes]] = [([], b"")]
    found = set()
    for outputs, before in places:  # grows as it goes
        now = allowed(grammar.matcher().mask(outputs))
        legal = {i for i, data in vocabulary.items() if any(word.startswith(before + data) for word in language)}
        legal |= {END} if before in language else set()
        next_bytes = {word[len(before) : len(before) + 1] for word in language if word.startswith(before)}
        assert now == legal or (len(next_bytes) == 1 and now and now <= legal)
        if END in now:
            found.add(before)
        if len(places) < 3000:
            places += [([*outputs, i], before + vocabulary[i]) for i in sorted(now - {END})]
    assert found == set(language)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "yes"]}, "minItems": 1, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pair"}]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "$defs": {"pair": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}},
}


def check_schema(text: str) -> None:
    found = json.loads(text)
    assert list(found) in (["name", "age", "tags"], ["name", "age", "tags", "next"])
    assert len(found["name"]) <= 6
    assert type(found["age"]) is int
    assert 0 <= found["age"] <= 120
    assert 1 <= len(found["tags"]) <= 3
    assert {*found["tags"]} <= {"a", "yes"}
    pair = found.get("next")
    assert pair is None or [type(item) for item in pair] == [bool, bool]


def check_object(text: str) -> None:
    assert isinstance(json.loads(text), dict)


def check_sum(text: str) -> None:
    assert re.fullmatch(r"\d{1,3}(\+\d{1,3}){0,4}", text)


def check_date(text: str) -> None:
    assert re.fullmatch(r"(19|20)\d\d-(0[1-9]|1[0-2])", text)


WALKS: dict[str, tuple[Kind, str, Callable[[str], None]]] = {
    "json_schema": ("json_schema", json.dumps(SCHEMA), check_schema),
    "json_object": ("json_object", "", check_object),
    "regex": ("regex", r"(19|20)\d\d-(0[1-9]|1[0-2])", check_date),
    "grammar": ("grammar", 'start: NUM ("+" NUM)~0..4\nNUM: /[0-9]{1,3}/', check_sum),
}


def walk(grammar: Grammar, vocabulary: dict[int, bytes], dice: random.Random) -> list[int]:
    """Any token that is allowed; after a while those that end something first."""
    matcher, outputs = grammar.matcher(), list[int]()
    closing = [i for end in (b'"', b"}", b"]", b":", b",") for i, data in vocabulary.items() if data == end]
    while True:
        now = allowed(matcher.mask(outputs))
        ends = [i for i in [END, *closing] if i in now] if len(outputs) > 60 else []
        token_id = ends[0] if ends else dice.choice(sorted(now))
        if token_id == END:
            return outputs
        outputs.append(token_id)
        assert len(outputs) < 2000


@pytest.mark.parametrize("kind", WALKS)
def test_every_completed_walk_matches(compiler: GrammarCompiler, vocabulary: dict[int, bytes], kind: str) -> None:
    grammar = compiler.compile(StructuredOutput(*WALKS[kind][:2]))
    found = set()
    for seed in range(40):
        text = b"".join(vocabulary[i] for i in walk(grammar, vocabulary, random.Random(seed))).decode()
        WALKS[kind][2](text)
        found.add(text)
    assert len(found) > 20


def test_whitespace_between_the_parts_of_a_json_text_has_an_end(
    compiler: GrammarCompiler, vocabulary: dict[int, bytes]
) -> None:
    matcher = compiler.compile(StructuredOutput("json_object")).matcher()
    [brace], [space] = ([i for i, data in vocabulary.items() if data == wanted] for wanted in (b"{", b" "))
    assert space in allowed(matcher.mask([brace]))
    assert space not in allowed(matcher.mask([brace, *[space] * 32]))


def test_a_matcher_built_from_outputs_says_what_the_one_says_that_followed_them(
    compiler: GrammarCompiler, vocabulary: dict[int, bytes]
) -> None:
    grammar = compiler.compile(StructuredOutput("json_schema", json.dumps(SCHEMA)))
    outputs = walk(grammar, vocabulary, random.Random(7))
    following = grammar.matcher()
    for count in range(len(outputs) + 1):
        here = following.mask(outputs[:count])
        assert np.array_equal(here, grammar.matcher().mask(outputs[:count]))
        assert np.array_equal(here, following.mask(outputs[:count])), "asked twice"


def test_an_output_that_cannot_be_is_told(compiler: GrammarCompiler, vocabulary: dict[int, bytes]) -> None:
    wrong = next(i for i, data in vocabulary.items() if data == b"z")
    matcher = compiler.compile(StructuredOutput("choice", '["yes"]')).matcher()
    with pytest.raises(GrammarError, match="the grammar does not go on with outputs 0 to 0"):
        matcher.mask([wrong])


def test_a_shared_automaton_that_is_full_is_made_anew(
    model_dir: Path, vocabulary: dict[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these requests needs many states of its own; together they need more than there may be."""
    limits = LLParserLimits(max_lexer_states=250, verbose_errors=False)
    monkeypatch.setattr(compiler_module, "_LIMITS", limits)
    grammar = GrammarCompiler(model_dir, WIDTH, {END}).compile(StructuredOutput("regex", "(a|b)*a(a|b){12}c"))
    a, b, c = (next(i for i, data in vocabulary.items() if data == wanted) for wanted in (b"a", b"b", b"c"))
    starts = []
    for seed in range(8):
        dice = random.Random(seed)
        matcher, outputs = grammar.matcher(), list[int]()
        for _ in range(30):
            now = allowed(matcher.mask(outputs))
            assert {a, b} <= now
            assert (c in now) == (len(outputs) > 12 and outputs[-13] == a)
            outputs.append(dice.choice((a, b)))
        starts.append(grammar._start)
    assert len({id(start) for start in starts}) > 1, "nothing was made anew"


def test_a_grammar_that_needs_more_than_the_limits_says_so(
    model_dir: Path, vocabulary: dict[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "_LIMITS", LLParserLimits(max_lexer_states=40, verbose_errors=False))
    matcher = GrammarCompiler(model_dir, WIDTH, {END}).compile(StructuredOutput("regex", "(a|b)*a(a|b){12}c")).matcher()
    ab = [next(i for i, data in vocabulary.items() if data == wanted) for wanted in (b"a", b"b")]
    dice = random.Random(0)
    outputs = [dice.choice(ab) for _ in range(200)]
    with pytest.raises(GrammarError, match="too many states"):
        matcher.mask(outputs)


@pytest.mark.parametrize(
    ("kind", "text", "complaint"),
    [
        ("json_schema", "{", "EOF while parsing"),
        ("json_schema", "3", "schema"),
        ("json_schema", '{"type": "nope"}', "Invalid type: nope"),
        ("json_schema", '{"$ref": "#"}', "grammar"),
        ("json_schema", '{"$ref": "http://127.0.0.1:9/schema.json"}', "does not fetch"),
        ("json_schema", '{"type":"array","items":' * 2000 + "{}" + "}" * 2000, "recursion limit"),
        (
            "json_schema",
            json.dumps(
                {
                    "allOf": [
                        {"anyOf": [{"type": "object", "properties": {f"{i}{j}": {}}} for j in range(8)]}
                        for i in range(8)
                    ]
                }
            ),
            "too large",
        ),
        ("regex", "((", "unclosed group"),
        ("regex", "(" * 20000 + ")" * 20000, "exceed the maximum number of nested parentheses"),
        ("choice", "[]", "length >= 1"),
        ("choice", '["a", 1]', "Expected `str`"),
        ("grammar", 'start: "a" nope', "nope"),
        ("grammar", 'start: start "a"', "grammar"),
        ("grammar", "\n" * 60000, "root"),
        ("grammar", "start: " + "(" * 15000, "nested"),
    ],
)
def test_what_is_no_grammar_is_refused_with_the_complaint(
    compiler: GrammarCompiler, kind: Kind, text: str, complaint: str
) -> None:
    with pytest.raises(InvalidRequestError, match="guided: ") as caught:
        compiler.compile(StructuredOutput(kind, text, "guided"))
    assert caught.value.param == "guided"
    assert complaint in caught.value.message
    assert len(caught.value.message) < 600
    assert caught.value.message.isprintable(), "one line"


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "a(b", "this regular expression cannot be used: unclosed group: '(' at character 2"),
        ("regex", 'a"(in regex)("', "this regular expression cannot be used: unclosed group: '(' at character 13"),
        (
            "regex",
            "(?P<a>x)(?P<a>y)",
            "this regular expression cannot be used: duplicate capture group name: 'a' at character 13",
        ),
        ("regex", r"a\bc", r"this regular expression cannot be used: look-around and \b are not supported"),
        ("grammar", 'start: "a"\nstart: "b"', 'this grammar cannot be used: line 2, column 8: duplicate rule: "start"'),
        ("grammar", "start: /(/", "this grammar cannot be used: line 1, column 8: unclosed group: '(' at character 1"),
        (
            "grammar",
            "start: start",
            "this grammar cannot be used: the grammar gave up after 0 outputs: no token may follow",
        ),
        (
            "grammar",
            'root ::= "a" | b',
            "this grammar cannot be used: read as GBNF (Lark has a rule `start:`): Rule 'b' not found",
        ),
        ("json_schema", "[]", "this JSON schema cannot be used: it is no JSON object"),
        (
            "json_schema",
            '{"type": "string", "pattern": "(a"}',
            "this JSON schema cannot be used: unclosed group: '(' at character 1",
        ),
    ],
)
def test_a_refusal_says_what_is_wrong_without_what_the_library_wraps_around_it(
    compiler: GrammarCompiler, kind: Kind, text: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(StructuredOutput(kind, text, "guided"))
    assert caught.value.message == f"guided: {message}"


def test_equal_texts_are_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.compile(StructuredOutput("regex", "once", "guided_regex"))
    assert compiler.compile(StructuredOutput("regex", "once", "structured_outputs.regex")) is first
    assert compiler.compile(StructuredOutput("grammar", 'start: "once"')) is not first


def test_models_without_tokenizer_or_end_token_are_told(model_dir: Path, tmp_path: Path) -> None:
    wanted = StructuredOutput("json_object", field="response_format")
    with pytest.raises(InvalidRequestError, match="response_format: this model has no end token"):
        GrammarCompiler(model_dir, WIDTH, set()).compile(wanted)
    with pytest.raises(InvalidRequestError, match="response_format: this model's tokenizer cannot be used"):
        GrammarCompiler(tmp_path, WIDTH, {END}).compile(wanted)
