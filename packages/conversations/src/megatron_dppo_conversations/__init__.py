"""Conversations: messages and tools of rows and of APIs, chat templates, and the forms in which models write calls."""
