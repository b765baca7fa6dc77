"""`agentrl check`: say what is wrong with an agent file before a GPU is paid for."""

from agentrl.check.report import Finding, Report
from agentrl.check.runner import check_agent

__all__ = ["Finding", "Report", "check_agent"]
