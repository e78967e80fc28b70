"""The tests that may be skipped with `--no-skips`, which `.ci/run` sets, and why.

Any other skip fails the run, because a check that silently stops running is lost.
"""

from __future__ import annotations

import pytest

ALLOWED = {
    "tests/unit/builds/test_cuda.py::test_the_real_nvcc_names_itself": "needs NVIDIA's toolkit",
    "tests/unit/builds/test_deploy.py::test_systemd": "a container has no systemd",
    "tests/process/api/test_proxies.py::": "nginx, haproxy: from a mirror that may be out of reach",
    "tests/system/worker/test_differential.py::test_made_up": "llama-server takes minutes to build",
    "tests/process/api/test_curl.py::": "curl comes from a mirror, which may be away",
}
"""Prefix of a test's name → the reason."""


class NoSkips:
    """Collects skips that are not allowed, and fails the run because of them."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        skipped = report.skipped and not hasattr(report, "wasxfail")
        if skipped and not report.nodeid.startswith(tuple(ALLOWED)):
            self.found.append(f"{report.nodeid}: {report.longrepr}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.found.append(f"{report.nodeid}: {report.longrepr}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.found and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.found:
            terminalreporter.write_line(f"SKIPPED, and tests/skips.py does not allow it: {line}")
