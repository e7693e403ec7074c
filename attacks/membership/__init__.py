"""Membership: was this record among a client's training records?"""
