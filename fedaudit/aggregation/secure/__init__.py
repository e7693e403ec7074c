"""Secure aggregation: the server learns the sum of its clients' vectors, or nothing.

The protocol is that of Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS
2017, against a server that follows it (Figure 4 without the signatures of the active case). From 100 clients up each
client is paired with a logarithmic number of others, as in Bell et al., "Secure Single-Server Aggregation with
(Poly)Logarithmic Overhead", CCS 2020 (SecAgg+).
"""
