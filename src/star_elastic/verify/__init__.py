"""Verification: is a model folder whole, consistent, finite, and the cut of its parent that it says it is?

    report = verify_folder("small", against="elastic")
    report.ok, report.faults

Nothing here imports torch, but for the forward pass on request.
"""

from star_elastic.verify.report import Check, Fault, Verification
from star_elastic.verify.run import verify_folder

__all__ = ["Check", "Fault", "Verification", "verify_folder"]
