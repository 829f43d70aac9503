"""The generic executor: the whole tick contract over a runtime's primitives."""

from superfluid.engines.executor.executor import Executor as Executor
