"""Compiles the analyzer so that servers don't have to. Does nothing if it is already compiled."""

from bigquery_emulator.googlesql.analysis.module import AnalyzerModule

if __name__ == "__main__":
    AnalyzerModule()
