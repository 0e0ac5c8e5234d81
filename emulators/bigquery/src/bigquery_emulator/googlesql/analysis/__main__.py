"""Compiles the analyzer, so that no server has to. Does nothing if that was done before."""

from bigquery_emulator.googlesql.analysis.module import AnalyzerModule

if __name__ == "__main__":
    AnalyzerModule()
