"""Compiles the analyzer, so that no server has to. Does nothing where that was done."""

from infra.emulators.bigquery.googlesql.analysis.module import AnalyzerModule

if __name__ == "__main__":
    AnalyzerModule()
