"""Launches of one kernel: Triton looks it up for the first one alone."""

from types import SimpleNamespace

from sglang_triattn.kernels.launcher import Launcher


class Kernel:
    """What `triton.jit` returns: compiles where `compiles`, and notes every launch."""

    def __init__(self, compiles: bool) -> None:
        self.arg_names = ["slots", "count", "WIDE", "BLOCK"]
        self.found, self.launched = 0, []
        self._compiles = compiles

    def __getitem__(self, grid):
        def launch(*arguments, WIDE, BLOCK, num_warps):
            self.found += 1
            self.launched.append((grid, *arguments, WIDE, BLOCK))
            return Compiled(self) if self._compiles else None

        return launch


class Compiled(SimpleNamespace):
    """What Triton compiled, which takes all arguments by place."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel=kernel)

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.launched.append((grid, *arguments))


def launches(kernel: Kernel) -> list:
    launch = Launcher(kernel, {"BLOCK": 64, "WIDE": True, "num_warps": 4})
    for count in range(3):
        launch((count, 1, 1), "slots", count)
    return kernel.launched


def test_a_kernel_is_looked_up_once():
    """Prevents a host that spends its time on finding the same kernel, and constants in each other's places."""
    kernel = Kernel(compiles=True)
    assert launches(kernel) == [((count, 1, 1), "slots", count, True, 64) for count in range(3)]
    assert kernel.found == 1


def test_an_interpreted_kernel_is_launched_each_time():
    """Prevents a launch of nothing where Triton's interpreter compiles no kernel."""
    kernel = Kernel(compiles=False)
    assert launches(kernel) == [((count, 1, 1), "slots", count, True, 64) for count in range(3)]
    assert kernel.found == 3
