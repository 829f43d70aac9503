"""What cells cost, how many there are, and the sizing of a check report."""

from pathlib import Path

import attrs
import pytest

from superfluid.engines.llamacpp import sizing
from superfluid.engines.llamacpp.model import PoolShape, choose_shape
from superfluid.engines.llamacpp.sizing import GIB, Memory, Unsized, cell_bytes, report, row_bytes
from superfluid.llama.header import Header, read_header
from superfluid.llama.library import DEVICE_CPU, DEVICE_GPU, DEVICE_IGPU, Device
from superfluid.llama.search import open_library


def header(arch: str = "llama", **entries: object) -> Header:
    given = {"block_count": 4, "embedding_length": 256, "attention.head_count": 8, "context_length": 8192} | {
        name.replace("__", "."): value for name, value in entries.items()
    }
    return Header({"general.architecture": arch} | {f"{arch}.{name}": value for name, value in given.items()}, ())


@pytest.mark.parametrize(
    ("element", "expected"),
    [("f16", 66), ("bf16", 66), ("f32", 132), ("q8_0", 68), ("q4_0", 36), ("iq4_nl", 36), ("q4_1", 40), ("q5_0", 44)],
)
def test_rows(element: str, expected: int) -> None:
    assert row_bytes(33, element) == expected


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (header(), 4 * 8 * 2 * 64),
        (header(attention__head_count_kv=2), 4 * 2 * 2 * 64),
        (header(attention__head_count_kv=[2, 0, 4]), (2 + 0 + 4 + 0) * 2 * 64),
        (header(attention__key_length=64, attention__value_length=16), 4 * 8 * (128 + 32)),
        (header(attention__shared_kv_layers=1), 3 * 8 * 2 * 64),
        (
            header(attention__key_length_swa=16, attention__sliding_window_pattern=[True, True, True, False]),
            8 * (3 * (32 + 64) + 128),
        ),
        (header(attention__key_length_swa=64), 4 * 8 * (128 + 64)),
        (header("qwen3next", full_attention_interval=4), 8 * 128),
        (header("qwen35", attention__recurrent_layers=[True, False, False, True]), 2 * 8 * 128),
        (header("minimax-01", attention__recurrent_layers=True), 1),
        (header("mamba", attention__recurrent_layers=True), 4 * 8 * 128),
        (Header({}, ()), 1),
    ],
)
def test_bytes_of_a_cell(model: Header, expected: int) -> None:
    assert cell_bytes(model) == expected


def test_the_demo_model(smollm2: Path) -> None:
    assert cell_bytes(read_header(smollm2)) == 23040
    assert cell_bytes(read_header(smollm2), "q8_0", "q8_0") == 30 * 3 * 2 * 68


ROOMY = Memory(64 * GIB, 64 * GIB, False)


@pytest.mark.parametrize(
    ("lanes", "window", "memory", "streams", "expected"),
    [
        (8, 4096, ROOMY, True, PoolShape(True, 10, 40960)),
        (1, 1000, ROOMY, True, PoolShape(True, 4, 4096)),
        (255, 512, ROOMY, True, PoolShape(True, 256, 256 * 512)),
        (8, 4096, Memory(0, 0, False), True, PoolShape(True, 10, 40960)),
        (8, 4096, Memory(40000 * 4096 * 10 // 6, GIB, False), True, PoolShape(True, 9, 36864)),
        (8, 4096, Memory(30000 * 4096 * 10 // 6, GIB, False), True, PoolShape(False, 32, 30208)),
        (8, 4096, Memory(1, GIB, False), True, PoolShape(False, 32, 4096)),
        (8, 4096, ROOMY, False, PoolShape(False, 32, 32768)),
        (40, 600, ROOMY, False, PoolShape(False, 80, 24064)),
        (255, 512, ROOMY, False, PoolShape(False, 256, 255 * 512)),
    ],
)
def test_the_shape_of_the_pool(lanes: int, window: int, memory: Memory, streams: bool, expected: PoolShape) -> None:
    assert choose_shape(lanes, window, memory, 4096, streams=streams) == expected


def test_exports() -> None:
    assert ROOMY.export_cells(1000, 4096) == 1000
    assert ROOMY.export_cells(1 << 40, 4096) == 8 * GIB // 4096
    assert Memory(1, 4 * GIB, False).export_cells(1000, 4096) == 1000
    device = Memory(2 * GIB, 16 * GIB, True)
    assert device.headroom == int(0.85 * 16 * GIB) // 8 // 2
    assert device.export_cells(1 << 40, 4096) == int(0.6 * (2 * GIB - device.headroom)) // 4096
    assert Memory(device.headroom, 16 * GIB, True).export_cells(1000, 4096) == 0


class TestReport:
    @pytest.fixture
    def devices(self, monkeypatch: pytest.MonkeyPatch) -> list[Device]:
        found = [Device("CPU", "a processor", 32 * GIB, 16 * GIB, DEVICE_CPU)]
        monkeypatch.setattr(type(open_library()), "devices", lambda library: found)
        monkeypatch.setattr(sizing, "host_memory", lambda: (10 * GIB, 32 * GIB))
        return found

    def test_the_cpu_is_sized_from_available_memory(self, devices: list[Device]) -> None:
        assert report(header(), open_library(), -1, 99) == {
            "budget_bytes": 10 * GIB,
            "weight_bytes": 0,
            "kv_bytes_per_token": 99,
            "trained_context": 8192,
        }

    def test_a_gpu_is_sized_from_its_own(self, devices: list[Device]) -> None:
        devices.insert(0, Device("CUDA", "a card", 8 * GIB, 8 * GIB - 1, DEVICE_GPU))
        assert report(header(), open_library(), -1, 99)["budget_bytes"] == int(0.85 * 8 * GIB)
        assert report(header(), open_library(), 0, 99)["budget_bytes"] == 10 * GIB

    @pytest.mark.parametrize(
        ("device", "words"),
        [
            (Device("CUDA", "a chip", GIB, GIB, DEVICE_IGPU), "a chip is an integrated GPU"),
            (Device("Vulkan", "a card", GIB, GIB, DEVICE_GPU), "the memory figure of Vulkan is not checked"),
        ],
    )
    def test_reasons_instead(self, devices: list[Device], device: Device, words: str) -> None:
        devices.insert(0, device)
        with pytest.raises(Unsized, match=words):
            report(header(), open_library(), -1, 99)

    def test_a_header_that_does_not_say(self, devices: list[Device]) -> None:
        model = header()
        del (cut := attrs.evolve(model, metadata=dict(model.metadata))).metadata["llama.context_length"]
        with pytest.raises(Unsized, match="no layer count or no trained context"):
            report(cut, open_library(), -1, 99)


def test_the_first_discrete_gpu_takes_the_layers() -> None:
    cpu = Device("CPU", "cpu", 1, 1, DEVICE_CPU)
    chip = Device("CUDA", "chip", 1, 1, DEVICE_IGPU)
    card = Device("CUDA", "card", 1, 1, DEVICE_GPU)
    assert sizing.offload_device([chip, card, cpu]) is card
    assert sizing.offload_device([chip, cpu]) is chip
    assert sizing.offload_device([cpu]) is None


def test_host_memory_is_known_here() -> None:
    available, total = sizing.host_memory()
    assert 0 < available <= total
