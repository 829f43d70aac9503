"""Whether a template has a thinking switch."""

from superfluid.codec.template import ChatTemplate, TemplateFailed

_SYSTEM = {"role": "system", "content": "probe"}
_USER = {"role": "user", "content": "probe"}
_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "probe", "parameters": {"type": "object", "properties": {}}},
}


def has_thinking_switch(template: ChatTemplate) -> bool:
    """Whether enable_thinking changes a prompt: any difference, or a failure on one side only."""
    for messages, tools in (([_USER], None), ([_SYSTEM, _USER], None), ([_SYSTEM, _USER], [_TOOL])):
        prompts: list[str | None] = []
        for thinking in (True, False):
            try:
                prompts.append(template.render(messages, tools, generation=True, kwargs={"enable_thinking": thinking}))
            except TemplateFailed:
                prompts.append(None)
        if prompts[0] != prompts[1]:
            return True
    return False
