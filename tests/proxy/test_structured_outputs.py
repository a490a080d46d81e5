"""Structured output as clients ask for it: what reaches the node, what is refused, what a node's refusal becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common import messages as m
from common.structured_output import MAX_GRAMMAR_BYTES, StructuredOutput

SCHEMA = {"type": "object", "properties": {"ä": {"type": ["integer", "null"]}, "b": {"default": None}}}
TEXT = json.dumps(SCHEMA, ensure_ascii=False)
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}

ASKED: list[tuple[dict[str, Any], StructuredOutput | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "structured_outputs": None, "guided_json": None, "guided_choice": None}, None),
    ({"response_format": {"type": "json_object"}}, StructuredOutput("json_object", "", "response_format")),
    ({"response_format": FORMAT}, StructuredOutput("json_schema", TEXT, "response_format.json_schema.schema")),
    ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput("json_schema", TEXT, "structured_outputs.json")),
    ({"structured_outputs": {"json": "{}"}}, StructuredOutput("json_schema", "{}", "structured_outputs.json")),
    (
        {"structured_outputs": {"regex": "a+", "json": None, "json_object": False}},
        StructuredOutput("regex", "a+", "structured_outputs.regex"),
    ),
    (
        {"structured_outputs": {"choice": ["ja", "näin"]}},
        StructuredOutput("choice", '["ja", "näin"]', "structured_outputs.choice"),
    ),
    (
        {"structured_outputs": {"grammar": 'start: "a"'}},
        StructuredOutput("grammar", 'start: "a"', "structured_outputs.grammar"),
    ),
    (
        {"structured_outputs": {"json_object": True}},
        StructuredOutput("json_object", "", "structured_outputs.json_object"),
    ),
    ({"guided_json": SCHEMA}, StructuredOutput("json_schema", TEXT, "guided_json")),
    ({"guided_regex": "a+"}, StructuredOutput("regex", "a+", "guided_regex")),
    ({"guided_choice": ["a"]}, StructuredOutput("choice", '["a"]', "guided_choice")),
    ({"guided_grammar": "root ::= x"}, StructuredOutput("grammar", "root ::= x", "guided_grammar")),
    (
        {"response_format": {"type": "text"}, "guided_regex": "a+"},
        StructuredOutput("regex", "a+", "guided_regex"),
    ),
]


@pytest.mark.parametrize(("body", "wanted"), ASKED)
async def test_all_ways_to_ask_reach_the_node_from_both_endpoints(
    proxy: Any, body: dict[str, Any], wanted: StructuredOutput | None
) -> None:
    node = await proxy.node(lambda _: proxy.ids("Hello"))
    await proxy.complete(max_tokens=1, **body)
    await proxy.chat(max_tokens=1, **body)
    for number in (1, 2):
        assert (await node.expect(m.Decode, number)).params.structured_output == wanted


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "poem"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "text", "json_schema": FORMAT["json_schema"]}}, "response_format", "json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "required",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "response_format.json_schema.name",
        "pattern",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "has none of json, regex, choice, grammar, json_object"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "must have one"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "has 2 of"),
    ({"structured_outputs": {"poem": "a"}}, "structured_outputs.poem", "not permitted"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "has 0 choices, must have from 1 to 1024"),
    ({"guided_choice": ["a"] * 1025}, "guided_choice", "has 1025 choices"),
    ({"guided_choice": ["a", 1]}, "guided_choice", "list of strings"),
    ({"guided_json": 5}, "guided_json", "must be a JSON schema"),
    ({"guided_regex": ["a"]}, "guided_regex", "string"),
    ({"guided_regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "guided_regex", "has 65537 bytes, at most 65536"),
    ({"guided_json": {"enum": ["é" * 40_000]}}, "guided_json", "at most 65536"),
    (
        {"guided_regex": "a", "guided_choice": ["a"]},
        "guided_regex",
        "guided_regex and guided_choice exclude each other",
    ),
    ({"response_format": {"type": "json_object"}, "guided_json": {}}, "response_format", "guided_json"),
    ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "structured_outputs.regex", "guided_regex"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
]


@pytest.mark.parametrize(("body", "param", "text"), REFUSED)
async def test_what_is_refused_before_a_node_sees_it(proxy: Any, body: dict[str, Any], param: str, text: str) -> None:
    node = await proxy.node(lambda _: proxy.ids("Hello"))
    status, reply = await proxy.post("/v1/completions", {"prompt": "x", **body})
    assert status == 400
    assert reply["error"]["param"] == param
    assert text in reply["error"]["message"]
    assert len(reply["error"]["message"]) < 500
    assert node.count(m.Decode) == 0


async def test_a_lone_surrogate_is_refused(proxy: Any) -> None:
    data = b'{"prompt": "x", "guided_regex": "\\ud800"}'
    async with proxy.http.post("/v1/completions", data=data, headers={"Content-Type": "application/json"}) as reply:
        assert reply.status == 400


@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_a_node_has_against_a_grammar_is_a_400_that_names_the_field(proxy: Any, is_stream: bool) -> None:
    node = await proxy.node()

    async def reject(decode: m.Decode) -> None:
        text = "guided_regex: unclosed group"
        fields = {"code": "invalid_value", "message": text, "is_retryable": False, "param": "guided_regex"}
        await node.send(m.Rejected(request_id=decode.request_id, leg=decode.leg, **fields))

    node._serve = reject
    status, reply = await proxy.post("/v1/completions", {"prompt": "x", "guided_regex": "((", "stream": is_stream})
    assert status == 400
    assert reply["error"]["param"] == "guided_regex"
    assert reply["error"]["message"] == "guided_regex: unclosed group"
    assert reply["error"]["type"] == "invalid_request_error"
