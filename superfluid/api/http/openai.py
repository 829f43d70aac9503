"""POST /v1/chat/completions (spec: http_openai, chat completions)."""

import time
from collections.abc import Sequence
from typing import Any

import attrs
from quart import Response

from superfluid.api.http import sse
from superfluid.api.http.access_log import AccessLine
from superfluid.api.http.answer import Answer
from superfluid.api.http.app import read_body
from superfluid.api.http.calls import Calls
from superfluid.api.http.choices import Running
from superfluid.api.http.context import Api
from superfluid.api.http.errors import context_length_exceeded, invalid, wrong_type
from superfluid.api.http.fields import Fields
from superfluid.api.http.media import Medium, read_media, refuse_media
from superfluid.api.http.options import MAX_TOP_LOGPROBS, Choices, read_choices, with_seed
from superfluid.api.http.refusals import refusals
from superfluid.api.http.reply import Delta, Reply, Usage, chat_logprobs
from superfluid.codec.conversation import normalized_tool, turns_of
from superfluid.codec.toolcalls.constraints import Constraint, ToolChoice
from superfluid.daemon.generation import GenerateOptions
from superfluid.daemon.model import Model, Started
from superfluid.link.events import Body, Channel, GenerationPrompt

FINGERPRINT = "superfluid"
TEMPLATE_FIELDS = ("reasoning_effort", "enable_thinking")


@attrs.frozen
class ChatRequest:
    """A chat request, read: the conversation, and everything that shapes the reply."""

    model: str
    messages: list[dict[str, Any]]
    media: list[Medium]
    tools: list[dict[str, Any]]
    tool_choice: ToolChoice
    response_format: Any
    parallel_calls: bool
    template_arguments: dict[str, Any]
    choices: Choices
    options: GenerateOptions
    want_logprobs: bool


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation as it was sent. Raises ApiError 400 for what is no message."""
    entries = fields.raw("messages")
    if entries is None or entries == []:
        raise invalid("messages must be non-empty", "messages")
    if not isinstance(entries, list):
        raise wrong_type("messages", "an array", entries)
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise wrong_type(f"messages[{index}]", "an object", entry)
        if not isinstance(entry.get("tool_calls"), list | None):
            raise wrong_type(f"messages[{index}].tool_calls", "an array", entry["tool_calls"])
    return entries


def read_tools(fields: Fields) -> list[dict[str, Any]]:
    """Declared functions, each as {"type": "function", "function": {...}}; key order is the client's."""
    return [read_tool(f"tools[{index}]", declared) for index, declared in enumerate(fields.array("tools"))]


def read_tool(field: str, declared: Any) -> dict[str, Any]:
    """Raises ApiError 400 for what is no function, or one without a name."""
    if not isinstance(declared, dict):
        raise wrong_type(field, "an object", declared)
    kind = declared.get("type", "function")
    if kind != "function" and "input_schema" not in declared:
        raise wrong_type(f"{field}.type", 'the text "function" (no other tools are served)', kind)
    tool = normalized_tool(declared)
    if tool is None:
        raise wrong_type(f"{field}.function", "an object", declared["function"])
    name = tool["function"].get("name")
    if not isinstance(name, str) or not name:
        place = f"{field}.function" if "function" in declared else field
        raise wrong_type(f"{place}.name", "a non-empty string", name)
    return tool


def read_chat(fields: Fields, api: Api) -> ChatRequest:
    """Raises ApiError 400 for what is missing or wrong."""
    model = fields.string("model")
    if not model:
        raise invalid("missing required field: model", "model")
    messages = read_messages(fields)
    with refusals(model):
        media = read_media(turns_of(messages))
    want_logprobs = fields.boolean("logprobs")
    alternatives = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS, 0)
    arguments = {name: fields.raw(name) for name in TEMPLATE_FIELDS if name in fields}
    arguments |= fields.mapping("chat_template_kwargs")
    choice = ToolChoice.read(fields.raw("tool_choice"))
    tools = read_tools(fields)
    choices = read_choices(fields, alternatives if want_logprobs else None)
    return ChatRequest(
        model=model,
        messages=messages,
        media=media,
        tools=[] if choice.withheld else tools,
        tool_choice=choice,
        response_format=fields.mapping("response_format") or None,
        parallel_calls=fields.boolean("parallel_tool_calls", True),
        template_arguments=arguments,
        choices=choices,
        options=api.called(choices),
        want_logprobs=want_logprobs,
    )


async def chat_completions(api: Api) -> Response:
    fields = Fields.parse(await read_body())
    chat = read_chat(fields, api)
    served = await api.model(chat.model)
    refuse_media(served, chat.media)
    line = AccessLine.of_request(served.name, chat.choices.stream)
    running = api.run()
    with refusals(served.name, served.larger_window):
        bodies = await served.render(chat.messages, chat.tools, chat.template_arguments)
        check_window(served, bodies)
        constraint = served.codec.constraint(
            chat.tools,
            chat.tool_choice,
            parallel=chat.parallel_calls,
            response_format=chat.response_format,
            opener=opener_of(bodies),
        )
        attempt = await served.grammars.choose(constraint)
        options = attrs.evolve(
            chat.options,
            provisional=chat.choices.stream and not chat.want_logprobs,
            provisional_calls=True,
            tools=chat.tools,
            grammar=None if attempt is None else (attempt.kind, attempt.text),
            start_channel=Channel.TOOL_CALL if constraint.forced else None,
        )
        running.add(await served.begin_all(bodies, [with_seed(options, i) for i in range(chat.choices.n)]))
    held = attempt is not None and attempt.holds_calls
    answer = ChatAnswer(api, chat, served, constraint, held, running, line)
    return await answer.respond(chat.choices.stream)


def opener_of(bodies: list[Body]) -> list[int]:
    return bodies[-1].span if isinstance(bodies[-1], GenerationPrompt) else []


def check_window(served: Model, bodies: list[Body]) -> None:
    """Raise ApiError 400 for a prompt that does not fit, the generation's opener included."""
    length = sum(len(getattr(body, "span", ())) for body in bodies)
    if length > served.window:
        raise context_length_exceeded(served.window, length, served.larger_window)


def usage_of(started: Sequence[Started], replies: Sequence[Reply]) -> Usage:
    """One choice's prompt, the sum of the completions, the largest warm prefix."""
    return Usage(
        prompt=started[0].prompt_tokens,
        completion=sum(reply.tokens for reply in replies),
        cached=max((reply.ended.warm_prefix for reply in replies if reply.ended is not None), default=0),
    )


class ChatAnswer(Answer):
    """The answer to one chat request, whole or streamed."""

    def __init__(
        self,
        api: Api,
        chat: ChatRequest,
        served: Model,
        constraint: Constraint,
        held: bool,
        running: Running,
        line: AccessLine,
    ) -> None:
        replies = [
            Reply(
                served.tokenizer,
                chat.choices.stop_filter(),
                one.generation.job.router,
                one.max_tokens,
                want_logprobs=chat.want_logprobs,
                calls=Calls(
                    served.codec,
                    chat.tools,
                    only_one=constraint.one_call and not held,
                    forced=constraint.forced,
                    withheld=chat.tool_choice.withheld,
                    choice=index,
                ),
                whole_reply=constraint.whole_reply,
            )
            for index, one in enumerate(running.started)
        ]
        head = {
            "id": f"chatcmpl-superfluid-{api.next_id()}",
            "object": "chat.completion.chunk" if chat.choices.stream else "chat.completion",
            "created": int(time.time()),
            "model": served.name,
            "system_fingerprint": FINGERPRINT,
        }
        super().__init__(running, replies, line, head)
        self._chat = chat
        self._tokenizer = served.tokenizer

    def _usage(self) -> Usage:
        return usage_of(self._running.started, self._replies)

    # ---- whole

    def _members(self) -> dict[str, Any]:
        choices = [self._choice(index, reply) for index, reply in enumerate(self._replies)]
        return {"choices": choices, "usage": self._usage().to_json()}

    def _headers(self) -> dict[str, str]:
        return {"x-superfluid-warm": str(self._usage().cached)}

    def _choice(self, index: int, reply: Reply) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        reasoning = "".join(reply.reasoning)
        if reasoning:
            message["reasoning_content"] = reasoning
        if reply.calls is not None and reply.calls.read:
            message["tool_calls"] = reply.calls.read
        choice = {"index": index, "finish_reason": reply.finish_reason, "message": message}
        if self._chat.want_logprobs:
            choice["logprobs"] = {"content": chat_logprobs(self._tokenizer, reply.logprobs)}
        return choice

    # ---- streamed

    def _opening(self, chunks: sse.Chunks) -> list[bytes]:
        return [
            chunks.chunk({"index": index, "finish_reason": None, "delta": {"role": "assistant"}})
            for index in range(len(self._replies))
        ]

    @property
    def _uniform(self) -> bool:
        return not self._chat.choices.continuous_usage

    def _chunk(self, chunks: sse.Chunks, index: int, delta: Delta) -> bytes:
        continuous = self._chat.choices.continuous_usage and delta.call is None
        if delta.call is None and delta.logprobs is None and not continuous:
            return chunks.delta(index, delta.name, delta.text)
        value = delta.text if delta.call is None else [delta.call]
        choice: dict[str, Any] = {"index": index, "finish_reason": None, "delta": {delta.name: value}}
        if delta.logprobs is not None:
            choice["logprobs"] = {"content": chat_logprobs(self._tokenizer, delta.logprobs)}
        if not continuous:
            return chunks.chunk(choice)
        usage = self._usage()
        return chunks.chunk(
            choice,
            usage={
                "prompt_tokens": usage.prompt,
                "completion_tokens": usage.completion,
                "total_tokens": usage.prompt + usage.completion,
            },
        )

    def _last(self, chunks: sse.Chunks) -> list[bytes]:
        """The last chunk of the last choice carries the usage."""
        usage = self._usage()
        members = {"usage": usage.to_json(), "superfluid": {"warm": usage.cached}}
        out: list[bytes] = []
        for index, reply in enumerate(self._replies):
            choice = {"index": index, "finish_reason": reply.finish_reason, "delta": {}}
            last = index == len(self._replies) - 1
            out.append(chunks.chunk(choice, **(members if last else {})))
        return out
