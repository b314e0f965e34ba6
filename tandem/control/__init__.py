"""The controller: one loop for sync and async training, on asyncio alone."""
