"""One document, many questions: the document is read once, and forks of its session are asked all at once.

    superfluid serve            # in another terminal, until it says "serving on"
    python examples/fanout.py README.md "What is this?" "How is it installed?"

Every fork shares the document's tokens, so the server reads them once, and the answers are made side by side.
"""

import argparse
import sys
from pathlib import Path

import trio

from superfluid.client import AsyncClient, AsyncSession, ClientError, NotReached, Reply, Sampling

QUESTIONS = ["What is it about, in one sentence?", "Who should read it?", "What is missing from it?"]


async def ask(document: AsyncSession, question: str, max_tokens: int) -> Reply:
    """The answer to one question, on a branch of its own."""
    branch = await document.fork()
    await branch.user(question)
    return await branch.generate(max_tokens)


async def fan_out(client: AsyncClient, text: str, questions: list[str], max_tokens: int) -> list[Reply]:
    """Answers in the order of the questions."""
    document = await client.session(
        Sampling(temperature=0.0), system=f"Answer questions about this document:\n\n{text}"
    )
    warm = await document.fork()  # its one token reads the document into the cache, before the others need it
    await warm.user(questions[0])
    await warm.generate(1)
    answers: dict[int, Reply] = {}

    async def answer(index: int) -> None:
        answers[index] = await ask(document, questions[index], max_tokens)

    async with trio.open_nursery() as nursery:
        for index in range(len(questions)):
            nursery.start_soon(answer, index)
    return [answers[index] for index in range(len(questions))]


async def main(arguments: argparse.Namespace) -> None:
    try:
        text = arguments.document.read_text()
    except (OSError, ValueError) as error:
        sys.exit(f"{arguments.document} is not read: {getattr(error, 'strerror', None) or error}")
    questions = arguments.question
    async with AsyncClient(arguments.socket) as client:
        replies = await fan_out(client, text, questions, arguments.max_tokens)
    for question, reply in zip(questions, replies, strict=True):
        print(f"\n# {question}\n{reply.text.strip()}")
        print(
            f"  ({reply.tokens_generated} tokens; {reply.warm_prefix} of the prompt were read already)", file=sys.stderr
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("document", type=Path)
    parser.add_argument("question", nargs="*", default=QUESTIONS)
    parser.add_argument("--socket", type=Path, help="the server's session socket")
    parser.add_argument("--max-tokens", type=int, default=96)
    failed: list[str] = []
    try:
        trio.run(main, parser.parse_args())
    except* NotReached as error:
        failed.append(f"{error.exceptions[0]}: start one with `superfluid serve`")
    except* ClientError as error:  # such as a document that is longer than the model's window
        failed.append(str(error.exceptions[0]))
    sys.exit(failed[0] if failed else 0)
