"""Training with model servers: synchronous, bounded, or fully asynchronous."""

from dreamcomm.server.errors import ServerError, ServerLost, ServerUnreachable
from dreamcomm.server.parameter_server import ParameterServer
from dreamcomm.server.report import ServerReport, WorkerCounts, WorkerReport
from dreamcomm.server.worker import Worker

__all__ = [
    "ParameterServer",
    "ServerError",
    "ServerLost",
    "ServerReport",
    "ServerUnreachable",
    "Worker",
    "WorkerCounts",
    "WorkerReport",
]
