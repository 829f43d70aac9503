"""POST /v1/chat/completions (spec: http_openai, chat completions)."""

import time
from collections.abc import AsyncIterator
from typing import Any

import attrs
from quart import Response, request

from superfluid.api.http import sse
from superfluid.api.http.app import json_response, read_body
from superfluid.api.http.choices import collect, merge
from superfluid.api.http.context import Api
from superfluid.api.http.errors import ApiError, invalid, wrong_type
from superfluid.api.http.fields import Fields
from superfluid.api.http.options import MAX_TOP_LOGPROBS, Choices, read_choices, with_seed
from superfluid.api.http.reply import Reply, Usage
from superfluid.daemon.model import Started
from superfluid.link.events import Channel, Generated
from superfluid.scheduler.generation import Committed, Ended, Provisional

FINGERPRINT = "superfluid"
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@attrs.frozen
class ChatRequest:
    """A chat request, read: the conversation in the codec's terms, and everything that shapes the reply."""

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    template_arguments: dict[str, Any]
    choices: Choices
    want_logprobs: bool


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation; text parts are joined, unknown part types skipped."""
    entries = fields.raw("messages")
    if entries is None or entries == []:
        raise invalid("messages must be non-empty", "messages")
    if not isinstance(entries, list):
        raise wrong_type("messages", "an array", entries)
    return [_message(entry, f"messages[{index}]") for index, entry in enumerate(entries)]


def _message(entry: Any, where: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise wrong_type(where, "an object", entry)
    fields = Fields(entry)
    role = ROLES.get(fields.string("role", "user"), "user")
    message: dict[str, Any] = {"role": role, "content": _content(entry.get("content"), f"{where}.content")}
    if role == "assistant":
        thought = fields.raw("reasoning_content") or fields.raw("reasoning")
        if isinstance(thought, str) and thought.strip():
            message["reasoning_content"] = thought.strip()
        calls = fields.raw("tool_calls")
        if isinstance(calls, list) and calls:
            message["tool_calls"] = [_call(call, f"{where}.tool_calls") for call in calls]
    elif role == "tool":
        for name in ("tool_call_id", "name"):
            if name in fields:
                message[name] = fields.string(name)
    return message


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(where, "a string or an array of parts", content)
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("text", "input_text"):
            if not isinstance(part.get("text"), str):
                raise wrong_type(f"{where}.text", "a string", part.get("text"))
            texts.append(part["text"])
        elif kind in ("image_url", "input_audio"):
            what = "images" if kind == "image_url" else "audio"
            raise ApiError(
                400, f"this model does not accept {what}: its runtime takes text only",
                code="unsupported_input", param=where,
            )  # fmt: skip
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong_type(where, "an array of {id, function {name, arguments}}", call)
    return {
        "id": call.get("id") or "",
        "type": "function",
        "function": {"name": function["name"], "arguments": function.get("arguments")},
    }


def read_tools(fields: Fields) -> list[dict[str, Any]]:
    """Declared functions, each wrapped as {"type": "function", "function": {...}}; key order is the client's."""
    tools = []
    for index, tool in enumerate(fields.array("tools")):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise wrong_type(f"tools[{index}]", "a function declaration with a name", tool)
        tools.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tools


def read_chat(fields: Fields, api: Api) -> ChatRequest:
    """Raises ApiError 400 for what is missing or wrong."""
    model = fields.string("model")
    if not model:
        raise invalid("missing required field: model", "model")
    messages = read_messages(fields)
    want_logprobs = fields.boolean("logprobs")
    alternatives = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS, 0)
    arguments = {
        name: fields.raw(name) for name in ("reasoning_effort", "enable_thinking") if fields.raw(name) is not None
    }
    arguments |= fields.mapping("chat_template_kwargs")
    tools = read_tools(fields)
    choice = fields.raw("tool_choice")
    if choice == "required" and not tools:
        raise invalid('constraint unsatisfiable: tool_choice is "required", but no tools are declared', "tool_choice")
    return ChatRequest(
        model=model,
        messages=messages,
        tools=[] if choice == "none" else tools,
        template_arguments=arguments,
        choices=read_choices(fields, alternatives if want_logprobs else None, *api.caller(request)),
        want_logprobs=want_logprobs,
    )


async def chat_completions(api: Api) -> Response:
    fields = Fields.parse(await read_body())
    chat = read_chat(fields, api)
    served = await api.model(chat.model)
    bodies = await served.render(chat.messages, chat.tools, chat.template_arguments)
    provisional = chat.choices.stream and not chat.want_logprobs
    options = attrs.evolve(chat.choices.options, provisional=provisional, tools=chat.tools)
    started = await served.begin_all(bodies, [with_seed(options, i) for i in range(chat.choices.n)])
    identity = f"chatcmpl-superfluid-{api.next_id()}"
    replies = [Reply(served.tokenizer, chat.choices.stop_filter(), one.max_tokens) for one in started]
    head = {"id": identity, "created": int(time.time()), "model": served.name, "system_fingerprint": FINGERPRINT}
    if chat.choices.stream:
        return Response(_stream(api, head, chat, started, replies), headers=sse.HEADERS)
    await collect(api, started, replies)
    usage = usage_of(started, replies)
    body = {
        **head,
        "object": "chat.completion",
        "choices": [_choice(index, reply, chat.want_logprobs) for index, reply in enumerate(replies)],
        "usage": usage.to_json(),
    }
    return json_response(body, headers={"x-superfluid-warm": str(usage.cached)})


def _choice(index: int, reply: Reply, want_logprobs: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "".join(reply.content)}
    reasoning = "".join(reply.reasoning)
    if reasoning:
        message["reasoning_content"] = reasoning
    if reply.calls:
        message["tool_calls"] = reply.calls
    choice = {"index": index, "finish_reason": reply.finish_reason, "message": message}
    if want_logprobs:
        choice["logprobs"] = {"content": reply.logprobs}
    return choice


def usage_of(started: list[Started], replies: list[Reply]) -> Usage:
    """One choice's prompt, the sum of the completions, the largest warm prefix."""
    ends = [reply.ended for reply in replies if reply.ended is not None]
    return Usage(
        prompt=started[0].prompt_tokens,
        completion=sum(end.tokens_generated for end in ends),
        cached=max((end.warm_prefix for end in ends), default=0),
    )


async def _stream(
    api: Api, head: dict[str, Any], chat: ChatRequest, started: list[Started], replies: list[Reply]
) -> AsyncIterator[bytes]:
    """The chunks of all choices; the last chunk of the last choice carries the usage."""
    head = {**head, "object": "chat.completion.chunk"}
    prompt = started[0].prompt_tokens
    produced = 0

    def chunk(index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "finish_reason": finish, "delta": delta}
        logprobs = more.pop("logprobs", None)
        if logprobs is not None:
            choice["logprobs"] = {"content": logprobs}
        return sse.event({**head, "choices": [choice], **more})

    def running() -> dict[str, Any]:
        if not chat.choices.continuous_usage:
            return {}
        return {"usage": {"prompt_tokens": prompt, "completion_tokens": produced, "total_tokens": prompt + produced}}

    yield b"".join(chunk(index, {"role": "assistant"}) for index in range(len(started)))
    async with merge(api, started) as merged:
        async for batch in sse.with_silences(merged):
            if batch is None:
                yield sse.COMMENT
                continue
            out: list[bytes] = []
            for index, item in batch:
                reply = replies[index]
                if isinstance(item, Provisional):
                    produced += item.n_tokens
                    if item.channel == Channel.TEXT:
                        ready = reply.text(item.text)
                        if ready:
                            out.append(chunk(index, {"content": ready}, **running()))
                    elif not reply.stopped:
                        reply.reasoning.append(item.text)
                        out.append(chunk(index, {"reasoning_content": item.text}, **running()))
                elif isinstance(item, Committed):
                    out += _committed(chunk, index, item, reply, chat.want_logprobs)
                else:
                    out += _ended(chunk, index, item, reply)
                    if reply.ended is None:  # an error frame went out: the stream is over
                        yield b"".join([*out, sse.DONE])
                        return
                if reply.stopped:
                    merged.stop(index)
            if all(reply.ended is not None for reply in replies):
                out.append(_last(chunk, started, replies))
            if out:
                yield b"".join(out)
    yield sse.DONE


def _committed(chunk: Any, index: int, item: Committed, reply: Reply, want_logprobs: bool) -> list[bytes]:
    """What a commit adds to what streamed ahead of it: calls, and all of it when logprobs were asked for."""
    out: list[bytes] = []
    start = 0
    for event in item.events:
        body = event.body
        if isinstance(body, Generated):
            if not want_logprobs:
                continue
            before = len(reply.logprobs)
            span = (item.logprobs or [])[start : start + len(body.span)]
            start += len(body.span)
            shown = "".join(reply.content), len(reply.reasoning)
            reply.take([event], span)
            text = "".join(reply.content)[len(shown[0]) :]
            if text or len(reply.logprobs) > before:
                out.append(chunk(index, {"content": text}, logprobs=reply.logprobs[before:]))
            out += [chunk(index, {"reasoning_content": text}) for text in reply.reasoning[shown[1] :]]
            continue
        known = len(reply.content)
        call = reply.take_call(event)
        if call is not None:
            opening = {**call, "function": {"name": call["function"]["name"], "arguments": ""}}
            rest = {"index": call["index"], "function": {"arguments": call["function"]["arguments"]}}
            out += [chunk(index, {"tool_calls": [opening]}), chunk(index, {"tool_calls": [rest]})]
        out += [chunk(index, {"content": text}) for text in reply.content[known:] if text]
    return out


def _ended(chunk: Any, index: int, item: Ended, reply: Reply) -> list[bytes]:
    try:
        rest = reply.end(item)
    except ApiError as error:
        reply.ended = None
        return [sse.event(error.frame())]
    return [chunk(index, {"content": rest})] if rest else []


def _last(chunk: Any, started: list[Started], replies: list[Reply]) -> bytes:
    usage = usage_of(started, replies)
    more = {"usage": usage.to_json(), "superfluid": {"warm": usage.cached}}
    last = len(replies) - 1
    return b"".join(
        chunk(index, {}, reply.finish_reason, **(more if index == last else {})) for index, reply in enumerate(replies)
    )
