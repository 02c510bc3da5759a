"""The codemod of ``opweave migrate``: vLLM-style ``CustomOp`` classes become ops and layers."""
