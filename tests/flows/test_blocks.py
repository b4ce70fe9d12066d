"""Prefect's own blocks, on a real server: a secret reaches DVC's process and nothing else."""

from __future__ import annotations

import pytest

from unidec.errors import ConfigError

VALUE = "correct-horse-battery"


def test_a_secret_is_dvcs_alone(prefect_server, monkeypatch, tmp_path):
    import os
    import subprocess
    import sys

    from prefect.blocks.system import Secret

    from flows import reproduce

    Secret(value=VALUE).save("remote-key", overwrite=True)
    values = reproduce.secret_values({"REMOTE_KEY": "remote-key"})
    assert values == {"REMOTE_KEY": VALUE} and "REMOTE_KEY" not in os.environ
    real = subprocess.Popen

    def speaks(_command, **options):  # DVC that says all it knows
        program = "import os; print('key', os.environ['REMOTE_KEY'])"
        return real([sys.executable, "-c", program], **options)

    monkeypatch.setattr(reproduce.subprocess, "Popen", speaks)
    said: list[str] = []
    assert reproduce.run(["push"], said.append, values) == (0, "key ********\n")
    assert said == ["key ********"]
    assert VALUE not in reproduce.dvc(["push"], None, values)
    with pytest.raises(ConfigError, match=r"source\.secrets\.REMOTE_KEY: no such secret") as caught:
        reproduce.secret_values({"REMOTE_KEY": "no-such-block"})
    assert VALUE not in str(caught.value)
