"""Appending to a paged cache and reading it back: conversion, fp8 and NVFP4 quantisation."""
