"""A client of one OpenAI endpoint, for the commands that a person runs: JSON answers and streamed chat.

Whatever goes wrong is one line for that person: no server, a missing key, an unknown model, an answer that is no JSON.
Knows no terminal.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, Self
from urllib.parse import urlsplit

import aiohttp

from common.errors import ConfigError, PeerError, UnavailableError

DEFAULT_URL: Final = "http://127.0.0.1:8000"
KEY_VARIABLE: Final = "TANDEM_API_KEY"

_CONNECT_SECONDS = 10.0
_REPLY_SECONDS = 10.0
_STREAM_SECONDS = 600.0  # without a byte: a long prompt may wait and compute that long before its first token
_MAX_LINE_BYTES = 1 << 20
_MAX_ERROR_CHARACTERS = 300


def add_endpoint_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default=DEFAULT_URL, help=f"the server, with or without /v1 at its end (default: {DEFAULT_URL})"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"key that the server asks for; better given as {KEY_VARIABLE}"
    )


class Endpoint:
    """An async context manager; all requests go through one session."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """api_key: that of $TANDEM_API_KEY when None. Raises ConfigError when `url` is none."""
        self.url = base_url(url)
        key = api_key or os.environ.get(KEY_VARIABLE)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_REPLY_SECONDS)
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=timeout,
            read_bufsize=_MAX_LINE_BYTES,
            trust_env=not _is_this_machine(self.url),  # HTTP_PROXY is for the world outside
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> Any:
        """The JSON of an answer. Raises UnavailableError or PeerError."""
        async with self._request("GET", path) as response:
            return await _json(response)

    async def models(self) -> list[str]:
        """What the server calls its models."""
        entries = (await self.get("/v1/models")).get("data")
        return [str(entry["id"]) for entry in entries or [] if isinstance(entry, dict) and "id" in entry]

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed answer, until [DONE]. An event that is an error is raised as PeerError."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_STREAM_SECONDS)
        async with (
            self._request("POST", path, json={**body, "stream": True}, timeout=timeout) as response,
            aclosing(_events(response)) as events,
        ):
            async for event in events:
                if event.get("error"):
                    raise PeerError(_error_text(event) or "the server broke off the answer without saying why")
                yield event

    @asynccontextmanager
    async def _request(self, method: str, path: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._session.request(method, self.url + path, **options) as response:
                if response.status >= 400:
                    raise await self._refusal(response, path)
                yield response
        except TimeoutError:
            raise UnavailableError(f"{self.url} does not answer in time") from None
        except aiohttp.ClientConnectorError as error:
            raise UnavailableError(
                f"no server answers at {self.url} ({_reason(error.os_error)});"
                " start one with `tandem serve`, or name another with --url"
            ) from None
        except (aiohttp.ClientError, ValueError) as error:  # ValueError: a line longer than any sane event
            raise UnavailableError(f"the connection to {self.url} broke: {error or type(error).__name__}") from None

    async def _refusal(self, response: aiohttp.ClientResponse, path: str) -> PeerError:
        if response.status == 401:
            is_given = "; the one that was given is not the right one" if self._headers else ""
            return PeerError(f"{self.url} asks for an API key{is_given}: give it as {KEY_VARIABLE} or with --api-key")
        raw = await response.content.read(_MAX_LINE_BYTES)
        try:
            text = _error_text(json.loads(raw))
        except ValueError:
            text = None
        return PeerError(text or f"{self.url}{path} answers with status {response.status} {response.reason}")


def base_url(url: str) -> str:
    """'host:8000', 'http://host:8000/v1/' -> 'http://host:8000'. Raises ConfigError."""
    given = url.strip()
    url = given if "://" in given else f"http://{given}"
    url = url.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_good = is_good and not parts.query and not parts.fragment and not _lacks_slashes(given, parts.port)
    except ValueError:  # a port or an address that is none
        is_good = False
    if not is_good:
        raise ConfigError(f"--url is {given!r}, must look like {DEFAULT_URL}")
    return url


def _lacks_slashes(url: str, port: int | None) -> bool:
    """Of 'http:/host', which would be a host called http; 'http:80' is one."""
    return "://" not in url and url.startswith(("http:", "https:")) and port is None


def _is_this_machine(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reason(error: OSError) -> str:
    """asyncio puts a text of its own over what the system says."""
    if error.errno and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)
    return error.strerror or str(error)


async def _json(response: aiohttp.ClientResponse) -> Any:
    try:
        return json.loads(await response.read())
    except ValueError:
        raise PeerError(f"{response.url} answers with something that is no JSON: is it an OpenAI endpoint?") from None


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[dict[str, Any], None]:
    async for raw in response.content:
        field, _, data = raw.decode(errors="replace").strip().partition(":")
        if field != "data":
            continue
        if (data := data.strip()) == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise PeerError(f"{response.url} streams something that is no JSON: {data[:80]!r}")
        yield event


def _error_text(body: Any) -> str | None:
    """The message of {"error": {"message": ...}} (or of what is nearly that), on one line."""
    error = body.get("error", body) if isinstance(body, dict) else None
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return " ".join(message.split())[:_MAX_ERROR_CHARACTERS] if isinstance(message, str) and message else None
