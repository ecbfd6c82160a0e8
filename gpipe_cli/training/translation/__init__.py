"""What only translation needs: sentences decoded and scored."""
