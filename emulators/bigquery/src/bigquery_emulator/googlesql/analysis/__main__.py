"""Compiles the analyzer, so that no server has to. Does nothing where that was done."""

from bigquery_emulator.googlesql.analysis.module import AnalyzerModule

if __name__ == "__main__":
    AnalyzerModule()
