"""What is free on this machine, in a container too, and what this process took."""

from unidec import machine


def test_a_container_has_less_than_its_machine(tmp_path, monkeypatch):
    files = [tmp_path / name for name in ("max", "current", "stat")]
    for file, text in zip(files, ("1000000", "400000", "anon 5\ninactive_file 100000\n"), strict=True):
        file.write_text(text)
    monkeypatch.setattr(machine, "_CGROUP", tuple(files))
    assert machine.available_host() == 700_000
    files[0].write_text("max\n")
    assert machine.available_host() > 1_000_000
    files[0].unlink()
    assert machine.available_host() > 1_000_000


def test_this_machine(tmp_path):
    assert machine.available_disk(tmp_path / "not" / "there") > 0
    assert machine.available_host() > 0 and machine.host_peak() > 1 << 20
    assert machine.memory_used()["host_used_gib"] > 0.001
