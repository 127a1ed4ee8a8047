"""The main job from end to end on a model small enough for two CPU cores."""

from star_elastic.demo.run import DemoReport, run_demo

__all__ = ["DemoReport", "run_demo"]
