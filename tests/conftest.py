"""Figures that a test measures for the reader are shown at the end, also those of parallel processes."""


def pytest_terminal_summary(terminalreporter):
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "figures" and report.when == "call":
                    terminalreporter.write_line(f"{report.nodeid}: {value}")
